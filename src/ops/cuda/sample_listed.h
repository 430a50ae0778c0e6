// SPDX-License-Identifier: Apache-2.0
// Filters and draws from candidates that are all listed.
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
  using Base::find_last_tie;
  using Base::kept_weight_of;
  using Base::least_;
  using Base::list;
  using Base::most_;
  using Base::num_listed_;
  using Base::p_;
  using Base::shared_;
  using Base::sum_of_cta;
  using Base::sums;
  using Base::top_k_;
  using Base::weight_of_listed;
  using Base::weight_of_tie;
  using Base::write_token;

  /// Draws and writes the token, where few candidates may be kept; else returns false. Candidates
  /// have ranks: larger values come first, equal ones in the order of ids. So a filter keeps the
  /// first ones, and each thread can find by itself whether it keeps the thread's candidate.
  __device__ bool draw_from_few() {
    uint4* few = shared_.few_listed.entries;
    uint32_t least = 1;  // key that may be kept
    if (top_k_ < p_.vocab && num_listed_ > FewListed::kMost / 4 && num_listed_ >= top_k_) {
      least_ = key_of(bound_);
      most_ = shared_.most;
      this->find_range(static_cast<uint64_t>(top_k_), 0, [&](const auto& add) {
        this->for_each([&](uint32_t key, uint32_t /*id*/) { add(key, 1U); });
      });
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
    if (num > FewListed::kMost) {
      __syncthreads();
      return false;
    }
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
      const uint64_t above = this->find_key(wanted, 0, [&](const auto& add) {
        this->for_each([&](uint32_t key, uint32_t /*id*/) { add(key, 1U); });
      });
      cut_ = {least_, static_cast<uint32_t>(wanted - above), cut_.min_weight};
    }
    if (shared_.top_p >= 1.0F) return;
    const uint64_t all = sums().mass;
    const uint64_t wanted =
        sampling::part_of(shared_.top_p, all + uint64_t{cut_.num_ties} * weight_of_tie(cut_));
    uint64_t above = all;
    if (all >= wanted) {
      most_ = shared_.most;
      const Cut before = cut_;
      above = this->find_key(wanted, 0, [&](const auto& add) {
        this->for_each([&](uint32_t key, uint32_t /*id*/) {
          add(key, this->template amount_of_key<true>(key, before));
        });
      });
      cut_.key = least_;
      cut_.num_ties = 1;
    }
    cut_.num_ties = sampling::ties_to_reach(wanted, above, weight_of_tie(cut_));
  }

  /// Draws from what the cut keeps of the list and writes the token.
  __device__ void draw() {
    const uint32_t tie = weight_of_tie(cut_);
    const auto all = sums();
    const uint32_t last_tie = find_last_tie(tie, all.ties);
    const auto weight_of = [&](uint32_t key, uint32_t id) {
      return weight_of_listed(key, id, tie, last_tie);
    };
    const uint64_t total = all.mass + uint64_t{cut_.num_ties} * tie;
    const uint64_t target = sampling::high_product(shared_.random, total);
    const uint32_t token = find_id(target + 1, weight_of);
    this->for_each([&](uint32_t key, uint32_t id) {
      if (id == token) write_token(id, weight_of(key, id), total);
    });
  }
};

}  // namespace flashplan::cuda
