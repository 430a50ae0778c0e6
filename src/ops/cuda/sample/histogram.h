// SPDX-License-Identifier: Apache-2.0
// Histograms of a row that sample() draws from: counts or masses of ranges of its values.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/blocks.h"

namespace flashplan::cuda {

/// a * b + c, rounded down.
__device__ inline float fused_down(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rd(a, b, c);
#else
  // For the emulator of the tests. Equal to the instruction above if a * b is exact, and c so large
  // that floats near it are whole numbers.
  return std::floor(a * b) + c;
#endif
}

// The first histogram has 32 bins for each power of two of the weight. Bin 0 has all weights
// below those of the other bins.
constexpr uint32_t kFirstBits = (157U << 5) - (kBins - 1);  // bits of bin 0's weight >> 18
constexpr float kBinsOfOne = 1024.0F;                       // bins for a distance of 1

/// Begins a histogram: sets all bins to 0.
template <class Row>
__device__ void clear_bins(Row& row) {
  row.shared.bins.clear();
  __syncthreads();
}

/// Finds, from the last bin down, the bin at which `above` plus the bins of all CTAs reach the sum
/// that is wanted: wanted_of(the sum of all bins). If they do not reach it, the bin's index is -1.
template <class WantedOf, class Row>
__device__ Bin find_bin_of_row(Row& row, uint64_t above, const WantedOf& wanted_of) {
  const int lane = lane_of_thread();
  const int ranks = cluster_size();
  const int own_rank = cluster_rank();
  const Bins& bins = row.shared.bins;
  __syncthreads();
  row.exchange.expect(kGroups * sizeof(uint64_t));
#pragma unroll 1
  for (int group = warp_of_thread(); group < kGroups; group += kRowWarps) {
    const uint64_t sum = sum_of_warp(bins.sum_of_group(group));
    if (lane < ranks) row.exchange.mail().send(row.groups + own_rank * kGroups + group, sum, lane);
  }
  row.exchange.receive();
  Bin bin{};
  bool is_reached = true;
  if (warp_of_thread() == 0) {
    // Lane 0 has the last group.
    const int group = kGroups - 1 - lane;
    uint64_t own = 0;
    uint64_t sum = 0;
    if (group >= 0) {
      own = row.groups[own_rank * kGroups + group];
#pragma unroll 8
      for (int rank = 0; rank < ranks; ++rank) sum += row.groups[rank * kGroups + group];
    }
    const uint64_t reached = above + sum_to_lane(sum);
    const uint64_t all = __shfl_sync(~0U, reached, 31);
    bin.wanted = wanted_of(all - above);
    is_reached = all >= bin.wanted;
    const BinOfLanes of_lanes = find_reached(reached, sum, bin.wanted);
    bin.own_above = sum_of_warp(lane < of_lanes.lane ? own : 0);
    bin.above = is_reached ? of_lanes.above : all;
    bin.index = is_reached ? kGroups - 1 - of_lanes.lane : -1;  // index of a group
    if (lane == 0) row.shared.group = bin;
  }
  __syncthreads();
  bin = row.shared.group;
  if (bin.index < 0) return bin;
  row.lists_have_bins = ranks <= kMaxCluster / 2;
  uint64_t* of_ranks = row.lists_have_bins ? reinterpret_cast<uint64_t*>(row.shared.candidates)
                                           : row.groups + ranks * kGroups;
  row.exchange.expect(kGroupBins * sizeof(uint64_t));
  const int index = bin.index * kGroupBins + kGroupBins - 1 - lane;
  const uint64_t own = bins.sum(index);
#pragma unroll 1
  for (int rank = warp_of_thread(); rank < ranks; rank += kRowWarps) {
    row.exchange.mail().send(of_ranks + own_rank * kGroupBins + lane, own, rank);
  }
  row.exchange.receive();
  if (warp_of_thread() == 0) {
    uint64_t sum = 0;
#pragma unroll 8
    for (int rank = 0; rank < ranks; ++rank) sum += of_ranks[rank * kGroupBins + lane];
    // If no lane reaches bin.wanted, find_lane() returns the last lane, which has bin 0: its `sum`
    // lacks what lanes have added to their own words of bin 0.
    const BinOfLanes of_lanes = find_lane(sum, bin.above, bin.wanted);
    bin.own_above += sum_of_warp(lane < of_lanes.lane ? own : 0);
    bin.above = of_lanes.above;
    bin.index = index + lane - of_lanes.lane;
    if (lane == 0) row.shared.found = bin;
  }
  __syncthreads();
  return row.shared.found;
}

/// Adds the part's elements to bins by position_of(). `kFiltered`: if weights are added, elements
/// that min-p drops or that are not above the cut add 0.
template <bool kByWeight, bool kFiltered, class Row>
__device__ void fill_bins(Row& row, const Cut& cut) {
  clear_bins(row);
  const float cut_value = cut.key == 0 ? -INFINITY : sampling::value_of(cut.key);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * 4; i < row.part.count(); i += kRowThreads * 4) {
    float x[4];
    int bins[4];
    uint32_t amounts[4];
    row.read(i, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      bins[e] = bin_of_position(row, position_of(row, x[e]));
      if (kByWeight) {
        amounts[e] = kFiltered ? row.kept_weight_of(x[e], cut) : row.weight_of(x[e]);
        if (kFiltered && !(x[e] > cut_value)) amounts[e] = 0;
      } else {
        amounts[e] = i + e < row.part.count() ? 1 : 0;
      }
    }
    row.shared.bins.add(bins, amounts);
  }
}

/// Adds the part's elements whose keys are in row.keys to bins of 2^shift keys each.
template <bool kByWeight, class Row>
__device__ void fill_bins_by_key(Row& row, const Cut& cut, int shift) {
  clear_bins(row);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * 4; i < row.part.count(); i += kRowThreads * 4) {
    float x[4];
    int bins[4];
    uint32_t amounts[4];
    row.read(i, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t key = key_of(x[e]);
      const bool takes_part =
          key >= row.keys.least && key <= row.keys.most && i + e < row.part.count();
      bins[e] =
          takes_part ? static_cast<int>((key - row.keys.least) >> shift) : Bins::first_of_lane();
      amounts[e] = takes_part ? amount_of_key<kByWeight>(row, key, cut) : 0U;
    }
    row.shared.bins.add(bins, amounts);
  }
}

/// What an element with this key adds to the bins: 1 or, if kByWeight, its weight, which is 0
/// unless the key is above the cut.
template <bool kByWeight, class Row>
__device__ uint32_t amount_of_key(Row& row, uint32_t key, const Cut& cut) {
  if (!kByWeight) return 1;
  if (key <= cut.key) return 0;
  return row.kept_weight_of(sampling::value_of(key), cut);
}

/// What the first histogram divides into bins; it grows with x. For a logit it is the negative
/// distance from the largest logit, for a probability its weight as a float, whose exponent and
/// first bits of the mantissa give the bin.
template <class Row>
__device__ float position_of(Row& row, float x) {
  if (!Row::kIsFromProbs) return -sampling::distance(x, row.scale);
  return sampling::times(sampling::times_to_one(x, row.scale.factor), 1073741824.0F);
}

template <class Row>
__device__ int bin_of_position(Row& row, float position) {
  if (Row::kIsFromProbs) {
    const uint32_t bin = (sampling::bits_of(position) >> 18) - kFirstBits;
    return bin < kBins ? static_cast<int>(bin) : Bins::first_of_lane();
  }
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: floats near it are whole numbers
  constexpr float kLowest = -static_cast<float>(kBins - 1) / kBinsOfOne;
  const float shifted = fused_down(position, kBinsOfOne, kMagic + static_cast<float>(kBins - 1));
  return position >= kLowest
             ? static_cast<int>(sampling::bits_of(shifted) - sampling::bits_of(kMagic))
             : Bins::first_of_lane();
}

template <class Row>
__device__ Range range_of_bin(Row& row, int bin) {
  if (Row::kIsFromProbs) {
    const uint32_t bits = (static_cast<uint32_t>(bin) + kFirstBits) << 18;
    return {bin == 0 ? -INFINITY : sampling::float_of(bits), sampling::float_of(bits + (1U << 18))};
  }
  const float low = static_cast<float>(bin - (kBins - 1)) / kBinsOfOne;
  return {bin == 0 ? -INFINITY : low, low + 1.0F / kBinsOfOne};
}

}  // namespace flashplan::cuda
