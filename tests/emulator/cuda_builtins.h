// SPDX-License-Identifier: Apache-2.0
// What the kernels of src/ops/cuda use of CUDA, for fibers: keywords, types, barriers, intrinsics.
// The headers of cuda/ forward to it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "simt.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ [[gnu::noinline]]
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ thread_local
#define threadIdx (::simt::thread_index())
#define blockIdx (::simt::block_index())
#define gridDim (::simt::grid_size())

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace cooperative_groups {

struct Cluster {
  unsigned num_blocks() const { return static_cast<unsigned>(simt::cta->cluster->size); }
  unsigned block_rank() const { return static_cast<unsigned>(simt::cta->rank); }
  void barrier_arrive() const { simt::cluster_arrive(); }
  void barrier_wait() const { simt::cluster_wait(); }
  template <class T>
  T* map_shared_rank(T* own, int rank) const {
    simt::Cluster& cluster = *simt::cta->cluster;
    if (rank < 0 || rank >= cluster.size) simt::fail("no such rank");
    if (cluster.ended[rank]) simt::fail("the CTA whose memory is asked for has ended");
    char* address = const_cast<char*>(reinterpret_cast<const char*>(own));
    return reinterpret_cast<T*>(cluster.anchors[rank] + (address - &simt::anchor));
  }
};
inline Cluster this_cluster() { return {}; }

}  // namespace cooperative_groups

inline void __syncthreads() {
  simt::Cta& c = *simt::cta;
  if (c.num_done != 0) simt::fail("a thread has ended before a barrier of others");
  const int phase = c.sync_phase;
  if (++c.sync_arrived == c.size) {
    c.sync_arrived = 0;
    ++c.sync_phase;
    simt::note_event();
  } else {
    while (c.sync_phase == phase) simt::yield();
  }
}

inline int __syncthreads_or(int value) {
  bool& any = simt::cta->any;
  if (value != 0) any = true;
  __syncthreads();
  const bool result = any;
  __syncthreads();  // all have read it
  any = false;
  __syncthreads();
  return result ? 1 : 0;
}

inline void __syncwarp() { simt::share(0); }
template <class T>
T __shfl_sync(unsigned /*mask*/, T value, int lane, int width = 32) {
  const int first = simt::cta->current % 32 / width * width;
  return simt::from_bits<T>(simt::share(simt::to_bits(value))[first + (lane & (width - 1))]);
}
template <class T>
T __shfl_xor_sync(unsigned /*mask*/, T value, int lanes) {
  const int lane = simt::cta->current % 32;
  return simt::from_bits<T>(simt::share(simt::to_bits(value))[lane ^ lanes]);
}
template <class T>
T __shfl_up_sync(unsigned /*mask*/, T value, int distance) {
  const int lane = simt::cta->current % 32;
  return simt::from_bits<T>(simt::share(simt::to_bits(value))[std::max(lane - distance, 0)]);
}
inline unsigned __ballot_sync(unsigned /*mask*/, bool value) {
  const uint64_t* values = simt::share(value ? 1 : 0);
  unsigned lanes = 0;
  for (int i = 0; i < 32; ++i) lanes |= static_cast<unsigned>(values[i]) << i;
  return lanes;
}
inline unsigned __reduce_add_sync(unsigned /*mask*/, unsigned value) {
  const uint64_t* values = simt::share(value);
  unsigned sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<unsigned>(values[i]);
  return sum;
}
inline unsigned __reduce_max_sync(unsigned /*mask*/, unsigned value) {
  const uint64_t* values = simt::share(value);
  return static_cast<unsigned>(*std::max_element(values, values + 32));
}

// Plain arithmetic is atomic here, because the fibers of a CTA run one at a time. These serve
// shared memory, which no other CTA accesses.
inline uint32_t atomicAdd(uint32_t* to, uint32_t value) {
  const uint32_t before = *to;
  *to += value;
  return before;
}
inline void atomicAdd(unsigned long long* to, unsigned long long value) { *to += value; }
inline void atomicMin(uint32_t* to, uint32_t value) { *to = std::min(*to, value); }
inline void atomicMax(uint32_t* to, uint32_t value) { *to = std::max(*to, value); }

/// As on a GPU, there is one NaN.
inline float simt_number(float x) { return x != x ? std::bit_cast<float>(0x7fffffffU) : x; }
inline float __fadd_rn(float a, float b) { return simt_number(a + b); }
inline float __fmul_rn(float a, float b) { return simt_number(a * b); }
inline float __fdiv_rn(float a, float b) { return simt_number(a / b); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, const T& value) {
  *to = value;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

struct __half {
  _Float16 value;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
struct __nv_bfloat16 {
  uint16_t bits;
};
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}
// 8-bit formats are named, but no kernel here uses them.
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
enum { __NV_SATFINITE };
using __nv_fp8_storage_t = unsigned char;
__half __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t, __nv_fp8_interpretation_t);
__nv_fp8_storage_t __nv_cvt_float_to_fp8(float, int, __nv_fp8_interpretation_t);
