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
class RowFilter {
 public:
  __device__ RowFilter(const FilterParams& params, const RowSplit& split, SampleShared& shared,
                       float* memory)
      : params_(params), row_(params, split, shared, memory) {}

  __device__ void run() {
    start_row(row_);
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
    if (row_.p.status != nullptr && is_first_thread_of_cluster()) {
      row_.p.status[row_.index()] = static_cast<int32_t>(error);
    }
  }

 private:
  /// Finds the cut: what the filters keep of the row.
  __device__ SampleError find_cut() {
    const SampleError of_row = load_row(row_);
    const SampleError error = row_.error_of_parameters();
    if (error != SampleError::kNone) return error;
    if (of_row != SampleError::kNone) return of_row;
    const bool is_greedy = row_.shared.temperature == 0.0F;
    row_.scale =
        sampling::make_scale(row_.largest, is_greedy ? 1.0F : row_.shared.temperature, kFromProbs);
    if (is_greedy) {
      cut_ = sampling::keep_largest(row_.largest);
      return SampleError::kNone;
    }
    cut_ = sampling::keep_all(sampling::least_weight(row_.shared.min_p));
    if (kFromProbs || row_.p.joint) {
      const uint64_t all = count_row(row_);
      // A call without `out` only lists log-probabilities after sample(), which has checked the
      // sum of the row already.
      if (kFromProbs && params_.out != nullptr && !sampling::sums_to_one(all, row_.largest)) {
        return SampleError::kProbabilities;
      }
    }
    apply_filters(row_, &cut_);
    return SampleError::kNone;
  }

  struct Ties {
    int end;         // of this part's elements at the cut, those before this place are kept
    uint64_t total;  // mass of what the cut keeps of the row
  };

  /// Finds which of the elements that equal the cut are kept. All threads of the cluster call it.
  __device__ Ties find_ties(const Cut& cut) {
    if (threadIdx.x == 0) row_.shared.tie_end = 0;
    const auto own = sum_segments(row_, cut);
    row_.publish_sums();
    const int lane = lane_of_thread();
    const uint64_t above = sum_of_warp(row_.exchange.value_of_rank(0));
    const uint64_t total = above + uint64_t{cut.num_ties} * row_.weight_of_tie(cut);
    const uint64_t passed = sum_of_warp(lane < cluster_rank() ? row_.exchange.value_of_rank(1) : 0);
    const uint64_t left = cut.num_ties > passed ? cut.num_ties - passed : 0;
    const uint64_t of_warp = lane < kRowWarps ? row_.shared.warp_values[lane][1] : 0;
    const uint64_t before =
        sum_of_warp(lane < warp_of_thread() ? of_warp : 0) + sum_to_lane(own.ties) - own.ties;
    if (left >= sum_of_warp(of_warp)) {
      if (threadIdx.x == 0) row_.shared.tie_end = row_.part.count();
    } else if (before < left && left <= before + own.ties) {
      row_.shared.tie_end = place_of_tie(cut, static_cast<int>(left - before)) + 1;
    }
    __syncthreads();
    return {row_.shared.tie_end, total};
  }

  /// The place of tie number `number`, counted from 1, in the thread's segment.
  __device__ int place_of_tie(const Cut& cut, int number) const {
    int i = begin_of_segment(row_, static_cast<int>(threadIdx.x));
#pragma unroll 1
    for (;; ++i) {
      if (key_of(row_.part.at(i)) == cut.key && --number == 0) return i;
    }
  }

  // --- Rows ---

  __device__ void write_row() {
    const Ties ties = find_ties(cut_);
    const float sum = sampling::sum_of_kept(ties.total, row_.scale);
    for_each([&](int i, float x) {
      const bool is_kept = sampling::keeps(cut_, __fadd_rn(x, 0.0F), i < ties.end, row_.scale);
      if (params_.is_mask) {
        store<kDType>(i, is_kept ? x : -INFINITY);
      } else {
        const float value = __fadd_rn(x, 0.0F);
        store<DType::kFloat32>(i,
                               is_kept ? sampling::probability_of(value, row_.scale, sum) : 0.0F);
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
    for (int i = static_cast<int>(threadIdx.x) * 4; i < row_.part.count(); i += kRowThreads * 4) {
      float x[4];
      row_.read(i, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (i + e < row_.part.count()) body(i + e, x[e]);
      }
    }
  }

  template <DType kTo>
  __device__ void store(int i, float value) const {
    using Storage = typename Format<kTo>::Storage;
    auto* out = reinterpret_cast<Storage*>(params_.out + row_.index() * params_.out_stride);
    out[row_.part.begin() + i] = Format<kTo>::store(value);
  }

  // --- Log-probabilities ---

  /// Writes the log-probabilities of the drawn token and of the likeliest tokens. If the row has an
  /// error, sample() has reported it and has drawn no token.
  __device__ void list(SampleError error) {
    if (error != SampleError::kNone) {
      write_no_logprobs(params_, row_.index());
      return;
    }
    const uint64_t total = find_ties(cut_).total;
    const int drawn = row_.p.ids[row_.index()] - row_.part.begin();
    if (row_.p.logprobs != nullptr && threadIdx.x == 0 && drawn >= 0 && drawn < row_.part.count()) {
      row_.p.logprobs[row_.index()] = log_probability_of(row_.part.at(drawn), total);
    }
    if (params_.num_top == 0) return;
    gather_top();
    const int index = static_cast<int>(threadIdx.x);
    if (cluster_rank() == 0 && index < params_.num_top) write_top(index, total);
  }

  __device__ float log_probability_of(float x, uint64_t total) const {
    const float temperature = row_.shared.temperature == 0.0F ? 1.0F : row_.shared.temperature;
    return sampling::log_probability_of(
        x, row_.scale, temperature, total,
        [](double part, double all) { return log_of_ratio(part, all); });
  }

  /// Collects the num_top largest values of the row, in any order, in row_.shared.gathered of the
  /// first CTA. Of values that equal the smallest of these, those with smaller ids are taken.
  __device__ void gather_top() {
    row_.has_candidates = row_.has_all_candidates = false;
    Cut top = sampling::keep_all(0);
    const auto threshold = find_threshold<false>(
        row_, &top, [&](uint64_t /*all*/) { return static_cast<uint64_t>(params_.num_top); });
    top.num_ties = static_cast<uint32_t>(threshold.wanted - threshold.above);
    const int tie_end = find_ties(top).end;
    // Calls body(i, key) for those of the thread's elements that are among the largest.
    const auto for_each_top = [&](const auto& body) {
      const float low = sampling::value_of(top.key);
      const auto begin = static_cast<int>(threadIdx.x) * 4;
      row_.for_words_from(low, begin, row_.part.count(), kRowThreads * 4, [&](int first) {
#pragma unroll 1
        for (int i = first; i < min(first + 4, row_.part.count()); ++i) {
          const uint32_t key = key_of(row_.part.at(i));
          if (key > top.key || (key == top.key && i < tie_end)) body(i, key);
        }
      });
    };
    if (threadIdx.x == 0) row_.shared.num_candidates = 0;
    __syncthreads();
    for_each_top([&](int, uint32_t) { atomicAdd(&row_.shared.num_candidates, 1U); });
    __syncthreads();
    if (warp_of_thread() == 0) row_.exchange.publish({row_.shared.num_candidates, 0, 0, 0});
    row_.exchange.receive();
    const uint64_t before =
        sum_of_warp(lane_of_thread() < cluster_rank() ? row_.exchange.value_of_rank(0) : 0);
    if (threadIdx.x == 0) row_.shared.num_candidates = static_cast<uint32_t>(before);
    __syncthreads();
    for_each_top([&](int i, uint32_t key) {
      const uint32_t place = atomicAdd(&row_.shared.num_candidates, 1U);
      const auto id = static_cast<uint32_t>(row_.part.begin() + i);
      row_.shared.gathered_mail.send(&row_.shared.gathered[place], uint64_t{key} << 32 | ~id, 0);
    });
    if (cluster_rank() != 0) return;
    if (threadIdx.x == 0) {
      const auto bytes = static_cast<uint32_t>(params_.num_top) * sizeof(uint64_t);
      row_.shared.gathered_mail.expect(static_cast<uint32_t>(bytes));
    }
    row_.shared.gathered_mail.wait(0);
  }

  /// Writes entry `index` of row_.shared.gathered in its place of the sorted list.
  __device__ void write_top(int index, uint64_t total) const {
    const uint64_t own = row_.shared.gathered[index];
    const auto key = static_cast<uint32_t>(own >> 32);
    int place = 0;
    uint32_t ties_before = 0;
#pragma unroll 1
    for (int i = 0; i < params_.num_top; ++i) {
      const uint64_t other = row_.shared.gathered[i];
      place += other > own ? 1 : 0;
      ties_before += other > own && static_cast<uint32_t>(other >> 32) == key ? 1U : 0U;
    }
    const float x = sampling::value_of(key);
    float logprob = -INFINITY;
    if (sampling::keeps(cut_, x, ties_before < cut_.num_ties, row_.scale)) {
      logprob = log_probability_of(x, total);
    }
    const auto id = static_cast<int32_t>(~static_cast<uint32_t>(own));
    params_.top_ids_of(row_.index())[place] = logprob > -INFINITY ? id : -1;
    params_.top_logprobs_of(row_.index())[place] = logprob;
  }

 public:
  /// Writes NaN, and -1 for ids, where no token was drawn. All threads of the cluster call it.
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
  SampleRow<kDType, kFromProbs, kHeld> row_;
  Cut cut_{};
};

}  // namespace flashplan::cuda
