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
  return std::floor(a * b) + c;  // where the result is a whole number and a * b is exact
#endif
}

template <DType kDType, bool kFromProbs, bool kHeld>
class SampleHistogram : protected SampleBlocks<kDType, kFromProbs, kHeld> {
  using Base = SampleBlocks<kDType, kFromProbs, kHeld>;

 public:
  using Base::Base;

 protected:
  using Base::expect;
  using Base::groups_;
  using Base::kept_weight_of;
  using Base::mail;
  using Base::part_;
  using Base::read;
  using Base::receive;
  using Base::scale_;
  using Base::shared_;

  /// Begins a histogram.
  __device__ void clear_bins() {
    shared_.bins.clear();
    __syncthreads();
  }

  /// As find_bin(), for the sums of the bins of all CTAs; what is wanted is wanted_of(the sum of
  /// all bins), which they need not reach.
  template <class WantedOf>
  __device__ Bin find_bin_of_row(uint64_t above, const WantedOf& wanted_of) {
    const int lane = lane_of_thread();
    const int ranks = cluster_size();
    const int own_rank = cluster_rank();
    const Bins& bins = shared_.bins;
    __syncthreads();
    expect(kGroups * sizeof(uint64_t));
#pragma unroll 1
    for (int group = warp_of_thread(); group < kGroups; group += kRowWarps) {
      const uint64_t sum = sum_of_warp(bins.sum_of_group(group));
      if (lane < ranks) mail().send(groups_ + own_rank * kGroups + group, sum, lane);
    }
    receive();
    Bin bin{};
    bool is_reached = true;
    if (warp_of_thread() == 0) {
      // Lane 0 has the last group, then the last bin of a group.
      const int group = kGroups - 1 - lane;
      uint64_t own = 0;
      uint64_t sum = 0;
      if (group >= 0) {
        own = groups_[own_rank * kGroups + group];
#pragma unroll 8
        for (int rank = 0; rank < ranks; ++rank) sum += groups_[rank * kGroups + group];
      }
      const uint64_t reached = above + sum_to_lane(sum);
      const uint64_t all = __shfl_sync(~0U, reached, 31);
      bin.wanted = wanted_of(all - above);
      is_reached = all >= bin.wanted;
      const BinOfLanes of_lanes = find_reached(reached, sum, bin.wanted);
      bin.own_above = sum_of_warp(lane < of_lanes.lane ? own : 0);
      bin.above = is_reached ? of_lanes.above : all;
      bin.index = is_reached ? kGroups - 1 - of_lanes.lane : -1;  // of the group
      if (lane == 0) shared_.group = bin;
    }
    __syncthreads();
    bin = shared_.group;
    if (bin.index < 0) return bin;
    lists_have_bins_ = ranks <= kMaxCluster / 2;
    uint64_t* of_ranks = lists_have_bins_ ? reinterpret_cast<uint64_t*>(shared_.candidates)
                                          : groups_ + ranks * kGroups;
    expect(kGroupBins * sizeof(uint64_t));
    const int index = bin.index * kGroupBins + kGroupBins - 1 - lane;
    const uint64_t own = bins.sum(index);
#pragma unroll 1
    for (int rank = warp_of_thread(); rank < ranks; rank += kRowWarps) {
      mail().send(of_ranks + own_rank * kGroupBins + lane, own, rank);
    }
    receive();
    if (warp_of_thread() == 0) {
      uint64_t sum = 0;
#pragma unroll 8
      for (int rank = 0; rank < ranks; ++rank) sum += of_ranks[rank * kGroupBins + lane];
      // The first bin, which is last here, reaches it with the lanes' parts, which are not in
      // `sum`.
      const BinOfLanes of_lanes = find_lane(sum, bin.above, bin.wanted);
      bin.own_above += sum_of_warp(lane < of_lanes.lane ? own : 0);
      bin.above = of_lanes.above;
      bin.index = index + lane - of_lanes.lane;
      if (lane == 0) shared_.found = bin;
    }
    __syncthreads();
    return shared_.found;
  }

  /// A histogram of the part by position; `kFiltered`: of what the cut keeps.
  template <bool kByWeight, bool kFiltered>
  __device__ void fill_bins(const Cut& cut) {
    clear_bins();
    const float cut_value = cut.key == 0 ? -INFINITY : sampling::value_of(cut.key);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      int bins[4];
      uint32_t amounts[4];
      read(i, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        bins[e] = bin_of_position(position_of(x[e]));
        if (kByWeight) {
          amounts[e] = kFiltered ? kept_weight_of(x[e], cut) : this->weight_of(x[e]);
          if (kFiltered && !(x[e] > cut_value)) amounts[e] = 0;
        } else {
          amounts[e] = i + e < part_.count() ? 1 : 0;
        }
      }
      shared_.bins.add(bins, amounts);
    }
  }

  /// Adds the part's elements with keys from least_ to most_ to bins of 2^shift keys each.
  template <bool kByWeight>
  __device__ void fill_bins_by_key(const Cut& cut, int shift) {
    clear_bins();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      int bins[4];
      uint32_t amounts[4];
      read(i, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t key = key_of(x[e]);
        const bool takes_part = key >= least_ && key <= most_ && i + e < part_.count();
        bins[e] = takes_part ? static_cast<int>((key - least_) >> shift) : Bins::first_of_lane();
        amounts[e] = takes_part ? amount_of_key<kByWeight>(key, cut) : 0U;
      }
      shared_.bins.add(bins, amounts);
    }
  }

  /// What a value adds to a count or, by weight, to the mass above the cut.
  template <bool kByWeight>
  __device__ uint32_t amount_of_key(uint32_t key, const Cut& cut) const {
    if (!kByWeight) return 1;
    if (key <= cut.key) return 0;
    return kept_weight_of(sampling::value_of(key), cut);
  }

  __device__ int shift_of_keys() const { return KeyRange{least_, most_}.shift(); }

  __device__ void narrow(int bin, int shift) {
    KeyRange keys{least_, most_};
    keys.narrow(bin, shift);
    set_keys(keys);
  }
  __device__ void set_keys(const KeyRange& keys) {
    least_ = keys.least;
    most_ = keys.most;
  }

  /// KeyRange::narrow() of the keys from least_ to most_.
  template <class ForEach>
  __device__ uint64_t find_range(uint64_t wanted, uint64_t above, const ForEach& for_each) {
    KeyRange keys{least_, most_};
    // Other CTAs may send already what goes to the other places of groups_.
    uint64_t* groups = groups_ + cluster_rank() * kGroups;
    above = keys.narrow(shared_.bins, groups, shared_.found, wanted, above, for_each);
    set_keys(keys);
    return above;
  }
  /// The same down to one key, which is then least_ and most_.
  template <class ForEach>
  __device__ uint64_t find_key(uint64_t wanted, uint64_t above, const ForEach& for_each) {
    while (least_ != most_) above = find_range(wanted, above, for_each);
    return above;
  }

  /// What the first histogram divides into bins; it grows with x. For a logit it is the negative
  /// distance from the largest logit, for a probability its weight as a float, whose exponent and
  /// first bits of the mantissa give the bin.
  __device__ float position_of(float x) const {
    if (!kFromProbs) return -sampling::distance(x, scale_);
    return sampling::times(sampling::times_to_one(x, scale_.factor), 1073741824.0F);
  }

  // The first histogram has 32 bins for each power of two of the weight. Bin 0 has all weights
  // below those of the others.
  static constexpr uint32_t kFirstBits =
      (157U << 5) - (kBins - 1);                // of a weight, without the last 18
  static constexpr float kBinsOfOne = 1024.0F;  // of distances

  __device__ int bin_of_position(float position) const {
    if (kFromProbs) {
      const uint32_t bin = (sampling::bits_of(position) >> 18) - kFirstBits;
      return bin < kBins ? static_cast<int>(bin) : Bins::first_of_lane();
    }
    constexpr float kMagic = 12582912.0F;  // leaves a whole number in the low bits
    constexpr float kLowest = -static_cast<float>(kBins - 1) / kBinsOfOne;
    const float shifted = fused_down(position, kBinsOfOne, kMagic + static_cast<float>(kBins - 1));
    return position >= kLowest
               ? static_cast<int>(sampling::bits_of(shifted) - sampling::bits_of(kMagic))
               : Bins::first_of_lane();
  }

  __device__ Range range_of_bin(int bin) const {
    if (kFromProbs) {
      const uint32_t bits = (static_cast<uint32_t>(bin) + kFirstBits) << 18;
      return {bin == 0 ? -INFINITY : sampling::float_of(bits),
              sampling::float_of(bits + (1U << 18))};
    }
    const float low = static_cast<float>(bin - (kBins - 1)) / kBinsOfOne;
    return {bin == 0 ? -INFINITY : low, low + 1.0F / kBinsOfOne};
  }

  uint32_t least_ = 0;  // of the keys that are divided, or of the candidates
  uint32_t most_ = 0;
  bool lists_have_bins_ = false;  // which other CTAs may still read
};

}  // namespace flashplan::cuda
