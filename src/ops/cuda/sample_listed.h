// SPDX-License-Identifier: Apache-2.0
// Top-k, min-p, top-p and the draw of sample() where the candidate lists have every element that
// they may keep.
#pragma once

#include <cstdint>

#include "ops/cuda/sample_list.h"

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
  using Base::kept_weight_of;
  using Base::least_;
  using Base::most_;
  using Base::num_listed_;
  using Base::p_;
  using Base::shared_;
  using Base::sum_of_cta;
  using Base::top_k_;
  using Base::weight_in;
  using Base::weight_of_tie;
  using Base::write_token;

  /// Draws and writes the token if at most FewListed::kMost candidates may be kept; else returns
  /// false. It ranks candidates by value, largest first, and equal ones by id. Top-k and top-p keep
  /// the first ranks, so each thread decides for its own candidate by comparing it with the others.
  __device__ bool draw_from_few() {
    uint4* few = shared_.few_listed.entries;
    uint32_t least = 1;  // key that may be kept
    if (top_k_ < p_.vocab && num_listed_ > FewListed::kMost / 4 && num_listed_ >= top_k_) {
      least_ = key_of(bound_);
      most_ = shared_.most;
      this->find_range(static_cast<uint64_t>(top_k_), 0, this->template amounts<false>());
      least = least_;
    }
    if (threadIdx.x == 0) shared_.num_candidates = 0;
    __syncthreads();
    this->for_each([&](uint32_t key, uint32_t id) {
      if (key < least) return;
      const uint32_t weight = kept_weight_of(sampling::value_of(key), cut_);
      if (weight == 0) return;
      const uint32_t place = atomicAdd(&shared_.num_candidates, 1U);
      if (place < FewListed::kMost) few[place] = make_uint4(key, id, weight, 0U);
    });
    __syncthreads();
    const auto num = static_cast<int>(shared_.num_candidates);
    if (num > FewListed::kMost) return false;
    const auto thread = static_cast<int>(threadIdx.x);
    const uint4 own = thread < num ? few[thread] : make_uint4(0U, 0U, 0U, 0U);
    int rank = 0;
    uint64_t above = 0;  // mass
    const int num_of_warp = warp_of_thread() * 32 < num ? num : 0;
#pragma unroll 2
    for (int c = 0; c < num_of_warp; ++c) {
      const uint4 other = few[c];
      const bool comes_before = other.x > own.x || (other.x == own.x && other.y < own.y);
      rank += comes_before ? 1 : 0;
      above += comes_before ? other.z : 0U;
    }
    bool is_kept = thread < num && rank < top_k_;
    uint64_t total = sum_of_cta(is_kept ? own.z : 0U);
    if (shared_.top_p < 1.0F) {
      is_kept = is_kept && above < sampling::part_of(shared_.top_p, total);
      total = sum_of_cta(is_kept ? own.z : 0U);
    }
    if (thread < num) few[thread].w = is_kept ? own.z : 0U;
    __syncthreads();
    if (!is_kept) return true;
    uint64_t before = 0;  // of kept ones, in the order of ids
#pragma unroll 2
    for (int c = 0; c < num; ++c) before += few[c].y < own.y ? few[c].w : 0U;
    const uint64_t target = sampling::high_product(shared_.random, total);
    if (before <= target && target < before + own.z) write_token(own.y, own.z, total);
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
