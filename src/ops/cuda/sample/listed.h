// SPDX-License-Identifier: Apache-2.0
// Top-k, min-p, top-p and the draw of sample() where the candidate lists have every element that
// they may keep.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/list.h"

namespace flashplan::cuda {

template <DType kDType>
class SampleListed : protected SampleList<kDType> {
  using Base = SampleList<kDType>;

 public:
  using Base::Base;

 protected:
  using Base::bound_;
  using Base::cut_;
  using Base::find_id;
  using Base::find_kept;
  using Base::least_;
  using Base::most_;
  using Base::num_listed_;
  using Base::p_;
  using Base::shared_;
  using Base::top_k_;
  using Base::weight_in;
  using Base::weight_of_tie;
  using Base::write_token;

  /// Draws and writes the token if few candidates may be kept; else returns false.
  __device__ bool draw_from_few_listed() {
    uint32_t least = 1;  // key that may be kept
    if (top_k_ < p_.vocab && num_listed_ > kMostFew / 4 && num_listed_ >= top_k_) {
      least_ = key_of(bound_);
      most_ = shared_.most;
      this->find_range(static_cast<uint64_t>(top_k_), 0, this->template amounts<false>());
      least = least_;
    }
    if (threadIdx.x == 0) shared_.num_candidates = 0;
    __syncthreads();
    this->for_each([&](uint32_t key, uint32_t id) {
      if (key < least) return;
      const auto place = static_cast<int>(atomicAdd(&shared_.num_candidates, 1U));
      if (place < kMostFew) this->set_few(place, key, id, cut_);
    });
    __syncthreads();
    const auto num = static_cast<int>(shared_.num_candidates);
    if (num > kMostFew) return false;
    this->draw_from_few(num, top_k_);
    return true;
  }

  /// Finds the cut. If fewer than top_k elements are listed, all others are dropped by min-p.
  __device__ void filter() {
    least_ = key_of(bound_);
    most_ = shared_.most;
    if (top_k_ < p_.vocab && num_listed_ >= top_k_) {
      const auto wanted = static_cast<uint64_t>(top_k_);
      const uint64_t above = this->find_key(wanted, 0, this->template amounts<false>());
      cut_ = {least_, static_cast<uint32_t>(wanted - above), cut_.min_weight};
    }
    if (shared_.top_p >= 1.0F) return;
    const uint64_t all = this->mass_above_cut();
    const uint64_t wanted =
        sampling::part_of(shared_.top_p, all + uint64_t{cut_.num_ties} * weight_of_tie(cut_));
    uint64_t above = all;
    if (all >= wanted) {
      most_ = shared_.most;
      above = this->find_key(wanted, 0, this->template amounts<true>());
      cut_.key = least_;
      cut_.num_ties = 1;
    }
    cut_.num_ties = sampling::ties_to_reach(wanted, above, weight_of_tie(cut_));
  }

  /// Draws from what the cut keeps of the list and writes the token.
  __device__ void draw() {
    const auto kept = find_kept();
    const auto weight_of = [&](uint32_t key, uint32_t id) { return weight_in(kept, key, id); };
    const uint64_t target = sampling::high_product(shared_.random, kept.mass);
    const uint32_t token = find_id(target + 1, weight_of);
    this->for_each([&](uint32_t key, uint32_t id) {
      if (id == token) write_token(id, weight_of(key, id), kept.mass);
    });
  }
};

}  // namespace flashplan::cuda
