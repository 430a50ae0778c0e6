// SPDX-License-Identifier: Apache-2.0
// In place of the library's ptx.h: what the attention kernels use of it, for fibers of the
// emulator. Copies to shared memory are made when they are waited for, no sooner.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "cuda_builtins.h"

#define FLASHPLAN_DEVICE inline
#undef __noinline__
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))

struct float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, !x) == 0; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = low | uint64_t{high} << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned from = selector >> (4 * i) & 7;
    result |= static_cast<unsigned>(bytes >> (8 * from) & 0xff) << (8 * i);
  }
  return result;
}
/// Time passes where it is asked for.
inline int64_t clock64() {
  static thread_local int64_t now = 0;
  return now += 1000;
}

namespace flashplan::device {

/// Dynamic shared memory.
alignas(1024) inline thread_local unsigned char smem[227 * 1024];

inline int thread_index() { return static_cast<int>(threadIdx.x); }
inline int opaque(int x) { return x; }
inline const unsigned char* opaque(const unsigned char* x) { return x; }
inline void allow_next_kernel() {}
inline void wait_for_last_kernel() {}

// An address of shared memory is a distance from the dynamic shared memory of the CTA's thread.
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - smem);
}
template <typename U = unsigned char>
U* at_shared(uint32_t address) {
  return reinterpret_cast<U*>(smem + static_cast<int32_t>(address));
}

struct AsyncCopy {
  uint32_t to;
  const void* from;
  int num_bytes;
  int num_zeros;
};
using AsyncGroups = std::deque<std::vector<AsyncCopy>>;
/// Those of the current thread, the latest of which is not ended.
inline AsyncGroups& async_groups() {
  static thread_local AsyncGroups groups[simt::kMaxThreads];
  AsyncGroups& own = groups[simt::cta->current];
  if (own.empty()) own.emplace_back();
  return own;
}
inline void cp_async_16(uint32_t to, const void* from) {
  async_groups().back().push_back({to, from, 16, 0});
}
inline void cp_async_16_padded(uint32_t to, const void* from, int num_bytes) {
  async_groups().back().push_back({to, from, num_bytes, 16 - num_bytes});
}
inline void cp_async_4(uint32_t to, const void* from) {
  async_groups().back().push_back({to, from, 4, 0});
}
inline void cp_async_4_if(bool copies, uint32_t to, const void* from) {
  async_groups().back().push_back({to, from, copies ? 4 : 0, copies ? 0 : 4});
}
inline void cp_async_8(uint32_t to, const void* from) {
  async_groups().back().push_back({to, from, 8, 0});
}
inline void prefetch_l2(const void*) {}
inline void cp_async_commit() { async_groups().emplace_back(); }
inline void copy_now(const std::vector<AsyncCopy>& copies) {
  for (const AsyncCopy& copy : copies) {
    std::memcpy(at_shared(copy.to), copy.from, static_cast<size_t>(copy.num_bytes));
    std::memset(at_shared(copy.to) + copy.num_bytes, 0, static_cast<size_t>(copy.num_zeros));
  }
}
template <int kPending>
void cp_async_wait() {
  AsyncGroups& groups = async_groups();
  while (static_cast<int>(groups.size()) > kPending + 1) {
    copy_now(groups.front());
    groups.pop_front();
  }
}
inline void cp_async_wait_all() {
  cp_async_commit();
  cp_async_wait<0>();
}

inline int lane_index() { return static_cast<int>(threadIdx.x) % 32; }
inline void ldmatrix(uint32_t (&to)[4], uint32_t row) {
  const int lane = lane_index();
  const uint64_t* rows = simt::share(row);
  for (int j = 0; j < 4; ++j) {
    std::memcpy(&to[j], at_shared(static_cast<uint32_t>(rows[j * 8 + lane / 4])) + lane % 4 * 4, 4);
  }
}
inline void ldmatrix_transposed(uint32_t (&to)[4], uint32_t row) {
  const int lane = lane_index();
  const uint64_t* rows = simt::share(row);
  const auto element = [&](int j, int r) {
    return uint32_t{at_shared<uint16_t>(static_cast<uint32_t>(rows[j * 8 + r]))[lane / 4]};
  };
  for (int j = 0; j < 4; ++j) {
    to[j] = element(j, lane % 4 * 2) | element(j, lane % 4 * 2 + 1) << 16;
  }
}
inline uint32_t transpose(uint32_t pair) {
  const int lane = lane_index();
  const int column = lane / 4;
  const uint64_t* pairs = simt::share(pair);
  const auto element = [&](int r) {
    return static_cast<uint32_t>(pairs[r * 4 + column / 2] >> (column % 2 * 16)) & 0xffffU;
  };
  return element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
}

inline uint32_t load_shared_2(uint32_t address) { return *at_shared<uint16_t>(address); }
inline uint32_t load_shared_4(uint32_t address) { return *at_shared<uint32_t>(address); }
inline uint32_t load_shared_relaxed_4(uint32_t address) {
  simt::yield();
  return load_shared_4(address);
}
inline uint32_t add_shared(uint32_t address, uint32_t value) {
  return std::exchange(*at_shared<uint32_t>(address), load_shared_4(address) + value);
}
inline uint2 load_shared_8(uint32_t address) { return *at_shared<uint2>(address); }
inline uint4 load_shared_16(uint32_t address) { return *at_shared<uint4>(address); }
inline const unsigned char* load_shared_pointer(uint32_t address) {
  return *at_shared<const unsigned char*>(address);
}
inline void load_shared_pointers(uint32_t address, const unsigned char*& first,
                                 const unsigned char*& second) {
  first = at_shared<const unsigned char*>(address)[0];
  second = at_shared<const unsigned char*>(address)[1];
}
inline void store_shared_pointer(uint32_t address, const unsigned char* value) {
  *at_shared<const unsigned char*>(address) = value;
}
inline void store_shared_pointers(uint32_t address, const unsigned char* first,
                                  const unsigned char* second) {
  at_shared<const unsigned char*>(address)[0] = first;
  at_shared<const unsigned char*>(address)[1] = second;
}
inline void store_shared_2(uint32_t address, uint32_t value) {
  *at_shared<uint16_t>(address) = static_cast<uint16_t>(value);
}
inline void store_shared_4(uint32_t address, uint32_t value) {
  *at_shared<uint32_t>(address) = value;
}
inline void store_shared_8(uint32_t address, uint2 value) { *at_shared<uint2>(address) = value; }
inline void store_shared_16(uint32_t address, uint4 value) { *at_shared<uint4>(address) = value; }

inline uint32_t load_global_4(const void* from) { return *static_cast<const uint32_t*>(from); }
inline uint2 load_global_8(const void* from) { return *static_cast<const uint2*>(from); }
inline float load_if(bool valid, const float* from, float otherwise) {
  return valid ? *from : otherwise;
}
inline float4 load_4_if(bool valid, const float* from, float otherwise) {
  if (!valid) return {otherwise, otherwise, otherwise, otherwise};
  return *reinterpret_cast<const float4*>(from);
}

inline uint4 load_once_16(const void* from) { return *static_cast<const uint4*>(from); }

constexpr float kLn2 = 0.69314718055994531F;
constexpr float kLog2e = 1.4426950408889634F;
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float reciprocal_fast(float x) { return 1.0F / x; }
inline float tanh_fast(float x) { return std::tanh(x); }
inline float cos_fast(float x) { return std::cos(x); }
inline float sin_fast(float x) { return std::sin(x); }

inline const unsigned char* shuffled_pointer(const unsigned char* pointer, int lane) {
  return __shfl_sync(0xffffffffU, pointer, lane);
}
inline uint4 transposed_in_four_lanes(uint4 words) {
  const auto exchange = [](uint32_t& first, uint32_t& second, int step) {
    const bool is_upper = (lane_index() & step) != 0;
    const uint32_t other = __shfl_xor_sync(0xffffffffU, is_upper ? first : second, step);
    (is_upper ? first : second) = other;
  };
  exchange(words.x, words.y, 1);
  exchange(words.z, words.w, 1);
  exchange(words.x, words.z, 2);
  exchange(words.y, words.w, 2);
  return words;
}
/// For messages about warps that wait for ever.
inline void note_wait(const char* what, uint32_t place, uint32_t parity) {
  simt::Cta& c = *simt::cta;
  c.waits[c.current / 32] = what;
  c.places[c.current / 32] = place;
  c.parities[c.current / 32] = parity;
}
/// A named barrier of the CTA.
struct NamedBarrier {
  std::vector<bool> has_come = std::vector<bool>(simt::kMaxThreads);
  int arrived = 0;
  uint64_t phase = 0;
  bool votes[2] = {};  // of the current phase and of the one before; phases take turns
};
inline NamedBarrier& named_barrier(int id) {
  static thread_local NamedBarrier barriers[16];
  return barriers[id];
}
/// As at the begin of a CTA.
inline void reset_named_barriers() {
  for (int id = 0; id < 16; ++id) named_barrier(id) = {};
}
inline void barrier_arrive(int id, int threads) {
  NamedBarrier& barrier = named_barrier(id);
  const auto thread = static_cast<size_t>(simt::cta->current);
  if (barrier.has_come[thread]) {
    if (simt::describe_waits != nullptr) simt::describe_waits();
    simt::fail("thread " + std::to_string(thread) + " comes twice to named barrier " +
               std::to_string(id));
  }
  barrier.has_come[thread] = true;
  if (++barrier.arrived < threads) return;
  barrier.has_come.assign(barrier.has_come.size(), false);
  barrier.arrived = 0;
  ++barrier.phase;
  // Until now these were the votes of the last phase but one, which all threads have read.
  barrier.votes[barrier.phase % 2] = false;
  simt::note_event();
}
inline void barrier_wait(int id, int threads) {
  const uint64_t phase = named_barrier(id).phase;
  barrier_arrive(id, threads);
  while (named_barrier(id).phase == phase) {
    note_wait("named barrier", static_cast<uint32_t>(id), 0);
    simt::yield();
  }
}
inline bool barrier_any(int id, int threads, bool x) {
  NamedBarrier& barrier = named_barrier(id);
  const uint64_t phase = barrier.phase;
  barrier.votes[phase % 2] = barrier.votes[phase % 2] || x;
  barrier_wait(id, threads);
  return barrier.votes[phase % 2];
}
inline float infinity() { return HUGE_VALF; }

// CTAs may run at the same time. Who waits for a counter of another CTA lets others go on.
inline int32_t arrive(int32_t* counter, int32_t amount = 1) {
  simt::note_event();
  return std::atomic_ref(*counter).fetch_add(amount);
}
inline int32_t load_relaxed(const int32_t* from) {
  note_wait("counter of CTAs", 0, 0);
  simt::yield();
  return std::atomic_ref(*const_cast<int32_t*>(from)).load();
}
inline int32_t load_acquire(const int32_t* from) { return load_relaxed(from); }
inline bool compare_and_swap(int32_t* value, int32_t last, int32_t next) {
  simt::note_event();
  return std::atomic_ref(*value).compare_exchange_strong(last, next);
}
inline void add_release(int32_t* counter, int32_t amount) { arrive(counter, amount); }
inline void store_release(int32_t* to, int32_t value) {
  simt::note_event();
  std::atomic_ref(*to).store(value);
}
inline int32_t atomicAdd(int32_t* to, int32_t value) { return arrive(to, value); }
inline void atomicMax(uint32_t* to, uint32_t value) { *to = std::max(*to, value); }

}  // namespace flashplan::device
