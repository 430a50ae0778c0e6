// SPDX-License-Identifier: Apache-2.0
// Counts the memory allocations of the whole program and can make them fail. Include it from one
// file of each test program.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

namespace flashplan::test {

constexpr int64_t kAllSucceed = std::numeric_limits<int64_t>::max();

inline std::atomic<int64_t> num_allocations{0};
/// Of the memory that was allocated, how many pieces have not been freed.
inline std::atomic<int64_t> num_alive{0};
/// The number of further allocations that succeed.
inline std::atomic<int64_t> allocations_left{kAllSucceed};
/// Whether allocations succeed again after one has failed.
inline std::atomic<bool> only_one_fails{false};

}  // namespace flashplan::test

// Not inlined, or GCC sees malloc() meet delete and warns.
[[gnu::noinline]] void* operator new(std::size_t size) {
  using namespace flashplan::test;
  ++num_allocations;
  const int64_t left = allocations_left--;
  const bool fails = only_one_fails ? left == 0 : left <= 0;
  void* memory = fails ? nullptr : std::malloc(size | 1);
  if (memory == nullptr) throw std::bad_alloc();
  ++num_alive;
  return memory;
}
// That of sanitizers would not call the one above.
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  if (memory != nullptr) --flashplan::test::num_alive;
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  operator delete(memory);
}
