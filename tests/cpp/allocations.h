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

inline std::atomic<int64_t> num_allocations{0};
/// The number of further allocations that succeed.
inline std::atomic<int64_t> allocations_left{std::numeric_limits<int64_t>::max()};

}  // namespace flashplan::test

// Not inlined, or GCC sees malloc() meet delete and warns.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++flashplan::test::num_allocations;
  void* memory = flashplan::test::allocations_left-- > 0 ? std::malloc(size | 1) : nullptr;
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
