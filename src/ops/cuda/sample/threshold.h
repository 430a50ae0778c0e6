// SPDX-License-Identifier: Apache-2.0
// The threshold of a filter of sample(), which is found in three steps: a histogram of the row
// tells the range of values that has it; the candidates, which are the elements in that range, go
// to lists that each CTA has of all of them; the threshold is found among them. Where they are too
// many, the next histogram divides their range.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/candidates.h"

namespace flashplan::cuda {

template <DType kDType, bool kFromProbs, bool kHeld>
class SampleThreshold : protected SampleCandidates<kDType, kFromProbs, kHeld> {
  using Base = SampleCandidates<kDType, kFromProbs, kHeld>;

 public:
  using Base::Base;

 protected:
  using Base::find_bin_of_row;
  using Base::has_too_many_;
  using Base::least_;
  using Base::most_;
  using Base::narrow;
  using Base::shared_;
  using Base::shift_of_keys;

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
      const uint64_t all = this->mass_of_candidates(*cut);
      const uint64_t wanted = wanted_of(all);
      if (all < wanted) return {wanted, all};
      return {wanted, this->template select<kByWeight>(cut, wanted, 0)};
    }
    if (cut->key == 0 && cut->min_weight == 0) {
      this->template fill_bins<kByWeight, false>(*cut);
    } else {
      this->template fill_bins<kByWeight, true>(*cut);
    }
    Bin bin = find_bin_of_row(0, wanted_of);
    if (bin.index < 0) return {bin.wanted, bin.above};
    if (threadIdx.x == 0) {
      shared_.own_above = bin.own_above;
      shared_.wanted = bin.wanted;
    }
    this->template gather<false>(this->range_of_bin(bin.index));
    while (has_too_many_) {
      if (least_ == most_) {
        cut->key = least_;
        cut->num_ties = 1;
        return {shared_.wanted, bin.above};
      }
      const int shift = shift_of_keys();
      this->template fill_bins_by_key<kByWeight>(*cut, shift);
      bin = find_bin_of_row(bin.above, [&](uint64_t /*all*/) { return shared_.wanted; });
      if (threadIdx.x == 0) shared_.own_above += bin.own_above;
      narrow(bin.index, shift);
      this->template gather<true>({sampling::value_of(least_), sampling::value_of(most_)});
    }
    has_candidates_ = kByWeight || bin.above == 0;
    has_all_candidates_ = !kByWeight && bin.above == 0;
    const uint64_t wanted = shared_.wanted;
    return {wanted, this->template select<kByWeight>(cut, wanted, bin.above)};
  }

  bool has_candidates_ = false;      // and the masses above them of each CTA
  bool has_all_candidates_ = false;  // nothing that is kept is above them
};

}  // namespace flashplan::cuda
