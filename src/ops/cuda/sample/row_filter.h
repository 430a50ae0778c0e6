// SPDX-License-Identifier: Apache-2.0
// Writes what filters keep of a row that a cluster has: its probabilities or its logits, or the
// log-probabilities of its likeliest tokens.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/filters.h"
#include "ops/filter_math.h"

namespace flashplan::cuda {

template <DType kDType, bool kFromProbs, bool kHeld>
class RowFilter : SampleFilters<kDType, kFromProbs, kHeld> {
  using Base = SampleFilters<kDType, kFromProbs, kHeld>;

 public:
  __device__ RowFilter(const FilterParams& params, const RowSplit& split, SampleShared& shared,
                       float* memory)
      : Base(params, split, shared, memory), params_(params) {}

  __device__ void run() {
    this->start();
    const SampleError error = find_cut();
    if (params_.out == nullptr) {
      list(error);
      return;
    }
    if (error == SampleError::kNone) {
      write_row();
    } else {
      fill(NAN);
    }
    if (p_.status != nullptr && is_first_thread_of_cluster()) {
      p_.status[row()] = static_cast<int32_t>(error);
    }
  }

 private:
  using Base::largest_;
  using Base::p_;
  using Base::part_;
  using Base::read;
  using Base::row;
  using Base::scale_;
  using Base::shared_;
  using Base::value_of_rank;

  /// Finds what filters keep.
  __device__ SampleError find_cut() {
    const SampleError of_row = this->load();
    const SampleError error = this->error_of_parameters();
    if (error != SampleError::kNone) return error;
    if (of_row != SampleError::kNone) return of_row;
    const bool is_greedy = shared_.temperature == 0.0F;
    scale_ = sampling::make_scale(largest_, is_greedy ? 1.0F : shared_.temperature, kFromProbs);
    if (is_greedy) {
      cut_ = sampling::keep_largest(largest_);
      return SampleError::kNone;
    }
    cut_ = sampling::keep_all(sampling::least_weight(shared_.min_p));
    if (kFromProbs || p_.joint) {
      const uint64_t all = this->count_row();
      // Where there is no output for the row, sample() has checked it.
      if (kFromProbs && params_.out != nullptr && !sampling::sums_to_one(all, largest_)) {
        return SampleError::kProbabilities;
      }
    }
    this->apply_filters(&cut_);
    return SampleError::kNone;
  }

  struct Ties {
    int end;         // elements of this part before this one are kept, if their key is the cut's
    uint64_t total;  // mass of what the cut keeps of the row
  };

  /// Finds which of the values of a cut's key are kept. All threads of the cluster call it.
  __device__ Ties find_ties(const Cut& cut) {
    if (threadIdx.x == 0) shared_.tie_end = 0;
    const auto own = this->sum_segments(cut);
    this->publish_sums();
    const int lane = lane_of_thread();
    const uint64_t above = sum_of_warp(value_of_rank(0));
    const uint64_t total = above + uint64_t{cut.num_ties} * this->weight_of_tie(cut);
    const uint64_t passed = sum_of_warp(lane < cluster_rank() ? value_of_rank(1) : 0);
    const uint64_t left = cut.num_ties > passed ? cut.num_ties - passed : 0;
    const uint64_t of_warp = lane < kRowWarps ? shared_.warp_values[lane][1] : 0;
    const uint64_t before =
        sum_of_warp(lane < warp_of_thread() ? of_warp : 0) + sum_to_lane(own.ties) - own.ties;
    if (left >= sum_of_warp(of_warp)) {
      if (threadIdx.x == 0) shared_.tie_end = part_.count();
    } else if (before < left && left <= before + own.ties) {
      shared_.tie_end = place_of_tie(cut, static_cast<int>(left - before)) + 1;
    }
    __syncthreads();
    return {shared_.tie_end, total};
  }

  /// The place of tie number `number`, counted from 1, in the thread's segment.
  __device__ int place_of_tie(const Cut& cut, int number) const {
    int i = this->begin_of_segment(static_cast<int>(threadIdx.x));
#pragma unroll 1
    for (;; ++i) {
      if (key_of(part_.at(i)) == cut.key && --number == 0) return i;
    }
  }

  // --- Rows ---

  __device__ void write_row() {
    const Ties ties = find_ties(cut_);
    const float sum = sampling::sum_of_kept(ties.total, scale_);
    for_each([&](int i, float x) {
      const bool is_kept = sampling::keeps(cut_, __fadd_rn(x, 0.0F), i < ties.end, scale_);
      if (params_.is_mask) {
        store<kDType>(i, is_kept ? x : -INFINITY);
      } else {
        const float value = __fadd_rn(x, 0.0F);
        store<DType::kFloat32>(i, is_kept ? sampling::probability_of(value, scale_, sum) : 0.0F);
      }
    });
  }

  __device__ void fill(float value) {
    __syncthreads();  // `out` may be the logits, which other threads may still read
    for_each([&](int i, float /*x*/) {
      if (params_.is_mask) {
        store<kDType>(i, value);
      } else {
        store<DType::kFloat32>(i, value);
      }
    });
  }

  /// Calls body(i, x) for the thread's elements of the part.
  template <class Body>
  __device__ void for_each(const Body& body) const {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      read(i, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (i + e < part_.count()) body(i + e, x[e]);
      }
    }
  }

  template <DType kTo>
  __device__ void store(int i, float value) const {
    using Storage = typename Format<kTo>::Storage;
    auto* out = reinterpret_cast<Storage*>(params_.out + row() * params_.out_stride);
    out[part_.begin() + i] = Format<kTo>::store(value);
  }

  // --- Log-probabilities ---

  /// Writes those of the drawn token and of the likeliest tokens. sample() has found the errors:
  /// where there is one, it has drawn no token.
  __device__ void list(SampleError error) {
    if (error != SampleError::kNone) {
      write_no_logprobs(params_, row());
      return;
    }
    const uint64_t total = find_ties(cut_).total;
    const int drawn = p_.ids[row()] - part_.begin();
    if (p_.logprobs != nullptr && threadIdx.x == 0 && drawn >= 0 && drawn < part_.count()) {
      p_.logprobs[row()] = log_probability_of(part_.at(drawn), total);
    }
    if (params_.num_top == 0) return;
    gather_top();
    const int index = static_cast<int>(threadIdx.x);
    if (cluster_rank() == 0 && index < params_.num_top) write_top(index, total);
  }

  __device__ float log_probability_of(float x, uint64_t total) const {
    const float temperature = shared_.temperature == 0.0F ? 1.0F : shared_.temperature;
    return sampling::log_probability_of(x, scale_, temperature, total, [](double part, double all) {
      return log_of_ratio(part, all);
    });
  }

  /// Collects the num_top largest values of the row, in any order, in shared_.gathered of the first
  /// CTA. Of equal values those with smaller ids come first.
  __device__ void gather_top() {
    this->has_candidates_ = this->has_all_candidates_ = false;
    Cut top = sampling::keep_all(0);
    const auto threshold = this->template find_threshold<false>(
        &top, [&](uint64_t /*all*/) { return static_cast<uint64_t>(params_.num_top); });
    top.num_ties = static_cast<uint32_t>(threshold.wanted - threshold.above);
    const int tie_end = find_ties(top).end;
    // Calls body(i, key) for those of the thread's elements that are among the largest.
    const auto for_each_top = [&](const auto& body) {
      const float low = sampling::value_of(top.key);
      const auto begin = static_cast<int>(threadIdx.x) * 4;
      this->for_words_from(low, begin, part_.count(), kRowThreads * 4, [&](int first) {
#pragma unroll 1
        for (int i = first; i < min(first + 4, part_.count()); ++i) {
          const uint32_t key = key_of(part_.at(i));
          if (key > top.key || (key == top.key && i < tie_end)) body(i, key);
        }
      });
    };
    if (threadIdx.x == 0) shared_.num_candidates = 0;
    __syncthreads();
    for_each_top([&](int, uint32_t) { atomicAdd(&shared_.num_candidates, 1U); });
    __syncthreads();
    if (warp_of_thread() == 0) this->publish({shared_.num_candidates, 0, 0, 0});
    this->receive();
    const uint64_t before = sum_of_warp(lane_of_thread() < cluster_rank() ? value_of_rank(0) : 0);
    if (threadIdx.x == 0) shared_.num_candidates = static_cast<uint32_t>(before);
    __syncthreads();
    for_each_top([&](int i, uint32_t key) {
      const uint32_t place = atomicAdd(&shared_.num_candidates, 1U);
      const auto id = static_cast<uint32_t>(part_.begin() + i);
      shared_.gathered_mail.send(&shared_.gathered[place], uint64_t{key} << 32 | ~id, 0);
    });
    if (cluster_rank() != 0) return;
    if (threadIdx.x == 0) {
      const auto bytes = static_cast<uint32_t>(params_.num_top) * sizeof(uint64_t);
      shared_.gathered_mail.expect(static_cast<uint32_t>(bytes));
    }
    shared_.gathered_mail.wait(0);
  }

  /// Writes entry `index` of shared_.gathered in its place of the sorted list.
  __device__ void write_top(int index, uint64_t total) const {
    const uint64_t own = shared_.gathered[index];
    const auto key = static_cast<uint32_t>(own >> 32);
    int place = 0;
    uint32_t ties_before = 0;
#pragma unroll 1
    for (int i = 0; i < params_.num_top; ++i) {
      const uint64_t other = shared_.gathered[i];
      place += other > own ? 1 : 0;
      ties_before += other > own && static_cast<uint32_t>(other >> 32) == key ? 1U : 0U;
    }
    const float x = sampling::value_of(key);
    float logprob = -INFINITY;
    if (sampling::keeps(cut_, x, ties_before < cut_.num_ties, scale_)) {
      logprob = log_probability_of(x, total);
    }
    const auto id = static_cast<int32_t>(~static_cast<uint32_t>(own));
    params_.top_ids_of(row())[place] = logprob > -INFINITY ? id : -1;
    params_.top_logprobs_of(row())[place] = logprob;
  }

 public:
  /// Where no token was drawn. All threads of the cluster call it.
  static __device__ void write_no_logprobs(const FilterParams& params, int32_t row) {
    if (cluster_rank() != 0) return;
    const auto index = static_cast<int>(threadIdx.x);
    if (index == 0 && params.logprobs != nullptr) params.logprobs[row] = NAN;
    if (index >= params.num_top) return;
    params.top_ids_of(row)[index] = -1;
    params.top_logprobs_of(row)[index] = NAN;
  }

 private:
  const FilterParams& params_;
  Cut cut_{};
};

}  // namespace flashplan::cuda
