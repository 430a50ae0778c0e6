// SPDX-License-Identifier: Apache-2.0
// Filters and the draw of sample() where one CTA has all elements that may be kept, and these are
// few: each is compared with each.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/draw.h"

namespace flashplan::cuda {

template <DType kDType, bool kFromProbs, bool kHeld>
class SampleFew : protected SampleDraw<kDType, kFromProbs, kHeld> {
  using Base = SampleDraw<kDType, kFromProbs, kHeld>;

 public:
  using Base::Base;

 protected:
  using Base::kept_weight_of;
  using Base::shared_;

  /// Puts a candidate in place `place` of shared_.few.
  __device__ void set_few(int place, uint32_t key, uint32_t id, const Cut& cut) {
    shared_.few[place] = make_uint4(~id, key, kept_weight_of(sampling::value_of(key), cut), 0U);
  }

  /// Draws a token from the first `num` candidates of shared_.few, at most kMostFew, and writes it.
  /// The candidates are ranked by value, the largest first, and equal ones by id, so top-k and
  /// top-p keep the first ranks. Two to eight neighbouring threads find the rank of one candidate:
  /// each compares it with a part of the others. All threads of the CTA call this.
  __device__ void draw_from_few(int num, int32_t top_k) {
    uint4* few = shared_.few;
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < kFewPadding) few[num + thread] = make_uint4(0U, 0U, 0U, 0U);
    __syncthreads();
    static_assert(2 * kMostFew <= kRowThreads);
    int log_parts = 1;
    while (log_parts < 3 && num << (log_parts + 1) <= kRowThreads) ++log_parts;
    const int parts = 1 << log_parts;
    const int index = thread >> log_parts;
    const int part = thread & (parts - 1);
    const int end = warp_of_thread() * 32 >> log_parts < num ? num : 0;  // same for all lanes
    const uint4 own = index < num ? few[index] : make_uint4(0U, 0U, 0U, 0U);
    uint32_t rank = 0;
    uint64_t above = 0;  // mass
#pragma unroll 1
    for (int c = part; c < end; c += kAtOnce * parts) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint4 other = few[c + u * parts];
        const bool comes_before = order_of(other) > order_of(own);
        rank += comes_before ? 1U : 0U;
        above += comes_before ? other.z : 0U;
      }
    }
    rank = sum_of_parts(rank, parts);
    above = sum_of_parts(above, parts);
    // The thread of the last rank that is kept tells the mass up to it.
    const auto last = static_cast<uint32_t>(min(top_k, num)) - 1;
    bool is_kept = index < num && rank <= last;
    if (is_kept && rank == last) shared_.total = above + own.z;
    __syncthreads();
    if (shared_.top_p < 1.0F) {
      const uint64_t wanted = sampling::part_of(shared_.top_p, shared_.total);
      is_kept = is_kept && above < wanted;
      if (is_kept && above + own.z >= wanted) shared_.wanted = above + own.z;
    } else if (thread == 0) {
      shared_.wanted = shared_.total;
    }
    if (part == 0 && is_kept) few[index].w = own.z;
    __syncthreads();
    const uint64_t total = shared_.wanted;
    const uint64_t target = sampling::high_product(shared_.random, total);
    uint64_t before = 0;  // of kept ones, in the order of ids
#pragma unroll 1
    for (int c = part; c < end; c += kAtOnce * parts) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint4 other = few[c + u * parts];
        before += other.x > own.x ? other.w : 0U;
      }
    }
    before = sum_of_parts(before, parts);
    if (part == 0 && is_kept && before <= target && target < before + own.z) {
      this->write_token(~own.x, own.z, total);
    }
  }

 private:
  static constexpr int kAtOnce = 4;
  static_assert(kAtOnce * 8 <= kFewPadding);

  static __device__ uint64_t order_of(const uint4& candidate) {
    return uint64_t{candidate.y} << 32 | candidate.x;
  }

  /// The sum over `parts` neighbouring threads.
  template <class T>
  static __device__ T sum_of_parts(T value, int parts) {
#pragma unroll 1
    for (int distance = 1; distance < parts; distance *= 2) {
      value += __shfl_xor_sync(~0U, value, distance);
    }
    return value;
  }
};

}  // namespace flashplan::cuda
