// SPDX-License-Identifier: Apache-2.0
// The threshold of a filter of sample(), which is found in three steps: a histogram of the row
// tells the range of values that has it; the candidates, which are the elements in that range, go
// to lists that each CTA has of all of them; the threshold is found among them. Where they are too
// many, the next histogram divides their range. For a small k, a lower bound of the k-th largest
// value is at hand from the largest values of warps, and the candidates are what reaches it.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample_candidates.h"

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
class SampleThreshold : protected SampleCandidates<kDType, kFromProbs, kHeld> {
  using Base = SampleCandidates<kDType, kFromProbs, kHeld>;

 public:
  using Base::Base;

 protected:
  using Base::bins_are_read_;
  using Base::for_each_candidate;
  using Base::groups_;
  using Base::has_too_many_;
  using Base::kept_weight_of;
  using Base::least_;
  using Base::most_;
  using Base::num_candidates_of;
  using Base::part_;
  using Base::position_of;
  using Base::read;
  using Base::share_of_rank;
  using Base::shared_;
  using Base::value_of_rank;

  struct Threshold {
    uint64_t wanted;
    uint64_t above;
  };

  /// Replaces cut->key by the largest key such that the values from it on have a count, or a mass,
  /// of wanted_of(that of all that takes part), which is what lies above cut->key. It then has one
  /// tie. Where all of it does not reach what is wanted, the cut stays. `above`: the count or mass
  /// above the key.
  template <bool kByWeight, class WantedOf>
  __device__ Threshold find_threshold(Cut* cut, const WantedOf& wanted_of) {
    if (has_all_candidates_) {  // all that has passed the filter before is in the lists
      if (has_few_) return find_mass_of_few(cut, wanted_of);
      const uint64_t all = mass_of_candidates(*cut);
      const uint64_t wanted = wanted_of(all);
      if (all < wanted) return {wanted, all};
      return {wanted, select<kByWeight>(cut, wanted, 0)};
    }
    constexpr uint32_t kKeyOfLowest = 0x007fffffU;  // -inf
    const bool has_bound = !kByWeight && bound_ > kKeyOfLowest;
    Range range{-INFINITY, INFINITY};
    Bin bin{0, 0, 0, wanted_of(0)};
    if (has_bound) {
      range.low = sampling::value_of(bound_);
    } else {
      if (cut->key == 0 && cut->min_weight == 0) {
        fill_bins<kByWeight, false>(*cut);
      } else {
        fill_bins<kByWeight, true>(*cut);
      }
      bin = find_bin(shared_.bins, groups_, true, 0, wanted_of, shared_.found);
      if (bin.index < 0) {
        bins_are_read_ = true;
        return {bin.wanted, bin.above};
      }
      range = range_of_bin(bin.index);
    }
    if (threadIdx.x == 0) {
      shared_.own_above = bin.own_above;
      shared_.wanted = bin.wanted;
    }
    if (has_bound) {
      this->template gather<true>(range);
    } else {
      this->template gather<false>(range);
    }
    while (has_too_many_) {
      if (least_ == most_) {
        cut->key = least_;
        cut->num_ties = 1;
        return {shared_.wanted, bin.above};
      }
      const int shift = shift_of_keys();
      fill_bins_by_key<kByWeight>(*cut, shift);
      bin = find_bin(
          shared_.bins, groups_, true, bin.above, [&](uint64_t /*all*/) { return shared_.wanted; },
          shared_.found);
      if (threadIdx.x == 0) shared_.own_above += bin.own_above;
      narrow(bin.index, shift);
      this->template gather<true>({sampling::value_of(least_), sampling::value_of(most_)});
    }
    has_candidates_ = kByWeight || bin.above == 0;
    has_all_candidates_ = !kByWeight && bin.above == 0;
    const uint64_t wanted = shared_.wanted;
    has_few_ =
        !kByWeight && __reduce_add_sync(~0U, static_cast<uint32_t>(value_of_rank(0))) <= kFew;
    if (has_few_) return {wanted, bin.above + select_of_few(cut, wanted - bin.above)};
    return {wanted, select<kByWeight>(cut, wanted, bin.above)};
  }

  /// So that the keys from least_ to most_ are divided into at most 2^kLogKeyBins bins.
  __device__ int shift_of_keys() const {
    return max(32 - __clz(static_cast<int>(most_ - least_)) - kLogKeyBins, 0);
  }

  __device__ void narrow(int bin, int shift) {
    least_ += static_cast<uint32_t>(bin) << shift;
    most_ = min(most_, least_ + ((1U << shift) - 1));
  }

  /// Begins a histogram of the cluster.
  __device__ void clear_bins() {
    // Other CTAs may still read what is there.
    if (bins_are_read_) cluster_sync();
    bins_are_read_ = false;
    shared_.bins.clear();
    __syncthreads();
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

  /// A histogram of the part's keys from least_ to most_.
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

  static constexpr uint32_t kFew = 256;  // candidates, which need not be divided into bins

  /// select() of a count among few candidates: each thread counts what is above its own. Returns
  /// the count above the threshold.
  __device__ uint64_t select_of_few(Cut* cut, uint64_t wanted) {
    for_each_candidate([&](uint32_t own) {
      uint32_t above = 0;
#pragma unroll 1
      for (int rank = 0; rank < cluster_size(); ++rank) {
        const uint32_t* keys = shared_.candidates + rank * share_of_rank();
        const int end = num_candidates_of(rank);
#pragma unroll 1
        for (int c = 0; c < end; c += 4) {  // zeros stand behind the last one
          const uint4 word = *reinterpret_cast<const uint4*>(keys + c);
          above += (word.x > own ? 1U : 0U) + (word.y > own ? 1U : 0U);
          above += (word.z > own ? 1U : 0U) + (word.w > own ? 1U : 0U);
        }
      }
      if (above >= wanted) return;
      atomicMin(&shared_.selected[0], own);
      atomicMax(&shared_.count_above, above);
    });
    __syncthreads();
    cut->key = shared_.selected[0];
    cut->num_ties = 1;
    return shared_.count_above;
  }

  /// find_threshold() of a mass after select_of_few(): what that has kept is put together, and each
  /// thread adds what is above its own.
  template <class WantedOf>
  __device__ Threshold find_mass_of_few(Cut* cut, const WantedOf& wanted_of) {
    uint32_t* keys = shared_.bins.low;  // the bins are not in use
    uint32_t* weights = keys + kFew;
    for_each_candidate([&](uint32_t key) {
      const uint32_t weight = amount_of_key<true>(key, *cut);
      if (weight == 0) return;
      const uint32_t place = atomicAdd(&shared_.num_kept, 1U);
      keys[place] = key;
      weights[place] = weight;
    });
    __syncthreads();
    const auto num_kept = static_cast<int>(shared_.num_kept);
    uint64_t all = 0;
#pragma unroll 1
    for (int c = lane_of_thread(); c < num_kept; c += 32) all += weights[c];
    all = sum_of_warp(all);
    const uint64_t wanted = wanted_of(all);
    if (all < wanted) return {wanted, all};
    const auto thread = static_cast<int>(threadIdx.x);
    const uint32_t own = thread < num_kept ? keys[thread] : 0;
    uint64_t above = 0;
    if (own != 0) {
#pragma unroll 4
      for (int c = 0; c < num_kept; ++c) above += keys[c] > own ? weights[c] : 0U;
      if (above < wanted) atomicMin(&shared_.selected[1], own);
    }
    __syncthreads();
    if (own == shared_.selected[1]) shared_.mass_above = above;
    __syncthreads();
    cut->key = shared_.selected[1];
    cut->num_ties = 1;
    return {wanted, shared_.mass_above};
  }

  /// find_threshold() among the candidates, with what is above them.
  template <bool kByWeight>
  __device__ uint64_t select(Cut* cut, uint64_t wanted, uint64_t above) {
    const Cut before = *cut;
    const uint32_t most = most_;
    const uint32_t least = least_;
    for (;;) {
      const int shift = shift_of_keys();
      shared_.bins.clear();
      __syncthreads();
      for_each_candidate([&](uint32_t key) {
        if (key < least_ || key > most_) return;
        const int rest = Bins::first_of_lane();
        const int bins[4] = {static_cast<int>((key - least_) >> shift), rest, rest, rest};
        const uint32_t amounts[4] = {amount_of_key<kByWeight>(key, before), 0U, 0U, 0U};
        shared_.bins.add(bins, amounts);
      });
      const Bin bin = find_bin(
          shared_.bins, groups_, false, above, [=](uint64_t /*all*/) { return wanted; },
          shared_.found);
      above = bin.above;
      narrow(bin.index, shift);
      if (shift == 0) break;
    }
    cut->key = least_;
    cut->num_ties = 1;
    least_ = least;
    most_ = most;
    return above;
  }

  /// Of those above the cut, and of all CTAs.
  __device__ uint64_t mass_of_candidates(const Cut& cut) {
    uint64_t mass = 0;
    for_each_candidate([&](uint32_t key) { mass += amount_of_key<true>(key, cut); });
    mass = sum_of_warp(mass);
    if (lane_of_thread() == 0) shared_.warp_values[warp_of_thread()][0] = mass;
    __syncthreads();
    const int lane = lane_of_thread();
    mass = sum_of_warp(lane < kRowWarps ? shared_.warp_values[lane][0] : 0);
    __syncthreads();
    return mass;
  }

  /// What a candidate adds to a count or, by weight, to the mass above the cut.
  template <bool kByWeight>
  __device__ uint32_t amount_of_key(uint32_t key, const Cut& cut) const {
    if (!kByWeight) return 1;
    if (key <= cut.key) return 0;
    return kept_weight_of(sampling::value_of(key), cut);
  }

  // The first histogram has 32 bins for each power of two; the first bin has all that is below.
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

  uint32_t bound_ = 0;               // a key that top_k values reach, or at most that of -inf
  bool has_candidates_ = false;      // and the masses of each CTA above them
  bool has_all_candidates_ = false;  // nothing that is kept is above them
  bool has_few_ = false;             // as few that bins are not needed
};

}  // namespace flashplan::cuda
