// SPDX-License-Identifier: Apache-2.0
// Reductions over a warp, and histograms with sums of 64 bits in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ops/cuda/sample/row_part.h"

namespace flashplan::cuda {

constexpr int kGroupBins = 32;  // bins of a group: one for each lane
constexpr int kGroups = 24;
constexpr int kBins = kGroups * kGroupBins;
constexpr int kLogKeyBins = 9;  // log2 of the bins that a range of keys is divided into
static_assert((1 << kLogKeyBins) <= kBins && kGroups <= 32);

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x) / 32; }

/// The sum over a warp of values below 2^54.
__device__ inline uint64_t sum_of_warp(uint64_t value) {
  constexpr int kLow = 27;  // bits: 32 such numbers add up to at most 32 bits
  const auto low = static_cast<uint32_t>(value) & ((1U << kLow) - 1);
  const auto high = static_cast<uint32_t>(value >> kLow);
  return __reduce_add_sync(~0U, low) + (uint64_t{__reduce_add_sync(~0U, high)} << kLow);
}

/// The sum of the values of this lane and of the lanes before, of 64 bits unless T is given.
template <class T = uint64_t>
__device__ T sum_to_lane(std::type_identity_t<T> value) {
#pragma unroll 1
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(~0U, value, distance);
    if (lane_of_thread() >= distance) value += other;
  }
  return value;
}

/// Sums by bin. The 64-bit atomics of shared memory are loops, so a sum is two words: the high one
/// counts the carries of the low one. The first bin may have most elements of a row, so each lane
/// of a warp adds these to a word of its own: atomics on one word would wait for each other. The
/// weights of that bin are below 2^6, so that these words stay below 2^32 in any row.
struct Bins {
  uint32_t low[kBins + 32];
  uint32_t high[kBins];

  /// The lane's own word of the first bin.
  __device__ static int first_of_lane() { return kBins + lane_of_thread(); }

  /// All threads of a CTA call it, after a barrier and before another one.
  __device__ void clear() {
    const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int i = thread; i < kBins; i += kRowThreads) low[i] = high[i] = 0;
    if (thread < 32) low[kBins + thread] = 0;
  }
  /// Adds to four bins, with four atomics on their way at once.
  __device__ void add(const int (&bins)[4], const uint32_t (&amounts)[4]) {
    bool carries[4];
    bool any = false;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t before = atomicAdd(&low[bins[e]], amounts[e]);
      carries[e] = before + amounts[e] < amounts[e];
      any = any || carries[e];
    }
    if (!any) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (carries[e]) atomicAdd(&high[bins[e]], 1U);
    }
  }
  __device__ void add(int bin, uint32_t amount) {
    const uint32_t before = atomicAdd(&low[bin], amount);
    if (before + amount < amount) atomicAdd(&high[bin], 1U);
  }
  /// The sum of a bin. That of the first bin lacks what lanes have added to words of their own.
  __device__ uint64_t sum(int bin) const { return low[bin] + (uint64_t{high[bin]} << 32); }
  /// The sum of the lane's bin of a group, and for the first group also the lane's own word of the
  /// first bin. Added up over the lanes of a warp, this is the sum of the group.
  __device__ uint64_t sum_of_group(int group) const {
    return sum(group * kGroupBins + lane_of_thread()) + (group == 0 ? low[first_of_lane()] : 0U);
  }
};

/// The first lane at which the running sum over the lanes reaches what is wanted; 31 if none does.
struct BinOfLanes {
  int lane;
  uint64_t above;  // the running sum before that lane
};
__device__ inline BinOfLanes find_reached(uint64_t reached, uint64_t sum, uint64_t wanted) {
  const unsigned lanes = __ballot_sync(~0U, reached >= wanted);
  const int lane = lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1 : 31;
  return {lane, __shfl_sync(~0U, reached - sum, lane)};
}
__device__ inline BinOfLanes find_lane(uint64_t sum, uint64_t above, uint64_t wanted) {
  return find_reached(above + sum_to_lane(sum), sum, wanted);
}

/// A range of values, or of positions (position_of()). Who uses it says whether `high` is in it.
struct Range {
  float low;
  float high;
};

/// The bin, from the last one down, at which a sum reaches `wanted`: of a CTA's bins (find_bin()),
/// or of those of all CTAs of the cluster (find_bin_of_row()).
struct Bin {
  int index;           // -1, for a cluster only: all bins together do not reach `wanted`
  uint64_t above;      // the sum above the bin, with what is above all bins
  uint64_t own_above;  // this CTA's part of `above`
  uint64_t wanted;
};

/// Finds, from the last bin down, the bin at which `above` plus this CTA's bins reach `wanted`. All
/// bins together must reach it. All threads call it after they have added to the bins, without a
/// barrier in between, and get the result. `groups` is shared memory for kGroups sums.
__device__ inline Bin find_bin(const Bins& bins, uint64_t* groups, uint64_t above, uint64_t wanted,
                               Bin& found) {
  const int lane = lane_of_thread();
  __syncthreads();
#pragma unroll 1
  for (int group = warp_of_thread(); group < kGroups; group += kRowWarps) {
    const uint64_t sum = sum_of_warp(bins.sum_of_group(group));
    if (lane == 0) groups[group] = sum;
  }
  __syncthreads();
  if (warp_of_thread() == 0) {
    // Lane 0 has the last group and, below, the last bin of the group that was found.
    const int group_of_lane = kGroups - 1 - lane;
    const BinOfLanes group =
        find_lane(group_of_lane >= 0 ? groups[group_of_lane] : 0, above, wanted);
    const int index = (kGroups - group.lane) * kGroupBins - 1 - lane;
    const BinOfLanes bin = find_lane(bins.sum(index), group.above, wanted);
    if (lane == 0) found = {index - bin.lane, bin.above, 0, wanted};
  }
  __syncthreads();
  return found;
}

/// The shared memory that KeyRange::narrow() uses.
struct KeySearch {
  Bins& bins;
  uint64_t* groups;  // sums of kGroups groups
  Bin& found;
};

/// The keys among which a threshold is searched.
struct KeyRange {
  uint32_t least, most;

  /// The range that has no keys.
  static __device__ KeyRange empty() { return {~0U, 0U}; }
  /// Extends the range to a key.
  __device__ void include(uint32_t key) {
    least = min(least, key);
    most = max(most, key);
  }
  /// A bin gets 2^shift() keys, so that there are at most 2^log_bins bins.
  __device__ int shift(int log_bins = kLogKeyBins) const {
    return max(32 - __clz(static_cast<int>(most - least)) - log_bins, 0);
  }
  __device__ void narrow(int bin, int shift) {
    least += static_cast<uint32_t>(bin) << shift;
    most = min(most, least + ((1U << shift) - 1));
  }
  /// Narrows the keys to those of one bin: that at which a running sum reaches `wanted`. The sum
  /// begins with `above`, the amounts of keys above `most`, and adds the others from the largest
  /// key down; with all of them it must reach `wanted`. for_each(add) calls add(key, amount) for
  /// the elements of this thread. Returns the sum before that bin. All threads of the CTA call
  /// narrow().
  template <class ForEach>
  __device__ uint64_t narrow(const KeySearch& search, uint64_t wanted, uint64_t above,
                             const ForEach& for_each) {
    const int shift_of_bin = shift();
    search.bins.clear();
    __syncthreads();
    for_each([&](uint32_t key, uint32_t amount) {
      if (key >= least && key <= most)
        search.bins.add(static_cast<int>((key - least) >> shift_of_bin), amount);
    });
    const Bin bin = find_bin(search.bins, search.groups, above, wanted, search.found);
    narrow(bin.index, shift_of_bin);
    return bin.above;
  }
  /// Calls narrow() until one key is left. Returns the sum of the amounts of the larger keys.
  template <class ForEach>
  __device__ uint64_t narrow_to_one(const KeySearch& search, uint64_t wanted, uint64_t above,
                                    const ForEach& for_each) {
    while (least != most) above = narrow(search, wanted, above, for_each);
    return above;
  }
};

}  // namespace flashplan::cuda
