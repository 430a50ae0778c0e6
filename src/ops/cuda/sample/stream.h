// SPDX-License-Identifier: Apache-2.0
// sample() of many rows: one CTA reads each row, and does not hold it in shared memory. If top-k is
// small or min-p is given, the CTA lists the elements that may pass while it reads the row, and
// then draws from the list. With top-p alone it draws as if there were no filter, until top-p keeps
// the token. Otherwise it reads the row twice.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/twice.h"

namespace flashplan::cuda {

template <DType kDType>
class SampleStream : SampleTwice<kDType> {
  using Base = SampleTwice<kDType>;

 public:
  using Base::Base;

  /// Draws and writes the token. Returns false, and writes nothing, if the row has an error, or if
  /// more elements may be kept than can be found in this way; Sampler then draws or reports.
  __device__ bool run() {
    if (threadIdx.x == 0) {
      part_.prefetch(kPrefetched);
      shared_.least = ~0U;
      shared_.most = 0;
      this->read_parameters();
    }
    __syncthreads();
    if (this->error_of_parameters() != SampleError::kNone) return false;
    if (!this->has_filters()) {
      if (p_.vocab > kMostEntries * sampling::kBlock) return false;
      draw_plain<kDType>(p_, row(), list_.plain);
      return true;
    }
    scale_ = sampling::make_scale(0.0F, shared_.temperature, false);
    cut_ = sampling::keep_all(sampling::least_weight(shared_.min_p));
    top_k_ = shared_.temperature == 0.0F ? 1 : shared_.top_k;
    if (sampling::is_tried(top_k_, shared_.top_p, shared_.min_p, p_.vocab)) {
      if (!is_countable(p_)) return false;
      const TriedRow tried = draw_by_tries<kDType>(p_, row(), list_.counted);
      if (tried.tried == Tried::kError) return true;
      if (tried.tried == Tried::kKept && p_.logprobs == nullptr) {
        if (threadIdx.x == 0) write(static_cast<int32_t>(tried.token), 0.0F, SampleError::kNone);
        return true;
      }
      take_over(tried);
    } else if (!probe()) {
      return false;
    }
    if (top_k_ > kMostStreamedTopK && cut_.min_weight == 0) {
      if (top_k_ < p_.vocab && shared_.top_p < 1.0F) return false;
      // First the narrow range, which nearly always has the threshold, then one that is sure to.
      bool has_bins = is_tried_;
#pragma unroll 1
      for (const float slack : {1.0004F, 1.0029F}) {
        if (!has_bins) count();
        if (!read_largest()) return false;
        const bool is_drawn =
            has_range() &&
            (top_k_ < p_.vocab ? this->template draw_from_row<true>(find_range_of_bins(slack))
                               : this->template draw_from_row<false>(find_range_of_bins(slack)));
        if (is_drawn) return true;
        has_bins = false;
        mass_above_bins_ = 0;
        __syncthreads();
      }
      return false;
    }
    gather();
    if (!read_largest()) return false;
    if (!finish_lists()) {
      const bool is_all = top_k_ >= p_.vocab && shared_.top_p >= 1.0F;
      return is_all && this->template draw_from_row<false>({-INFINITY, -INFINITY});
    }
    if (draw_from_few_listed()) return true;
    filter();
    draw();
    return true;
  }

 private:
  using Base::bins_;
  using Base::bound_;
  using Base::count;
  using Base::cut_;
  using Base::draw;
  using Base::draw_from_few_listed;
  using Base::filter;
  using Base::find_range_of_bins;
  using Base::finish_lists;
  using Base::has_range;
  using Base::is_tried_;
  using Base::kVec;
  using Base::least_;
  using Base::list;
  using Base::list_;
  using Base::mass_above_bins_;
  using Base::most_;
  using Base::num_;
  using Base::p_;
  using Base::part_;
  using Base::read_largest;
  using Base::row;
  using Base::scale_;
  using Base::share_extremes;
  using Base::shared_;
  using Base::token_;
  using Base::top_k_;
  using Base::total_;
  using Base::write;

  /// The first kProbed elements of the row are read before the others, to find a value that all
  /// candidates must reach.
  static constexpr int32_t kProbed = kRowWarps * RowPart<kDType, false>::kBlock;
  static constexpr int32_t kPrefetched = 3 * kProbed;  // memory is busy while they are probed

  /// Finds a bound for the list in the row's first elements. False if the list would be too long.
  __device__ bool probe() {
    if (part_.count() < kProbed) return false;
    float largest = -INFINITY;
    float smallest = INFINITY;  // of the largest ones of words
    part_.stream(kProbed, [&](const float (&x)[kVec], int i) {
      float of_word = x[0];
#pragma unroll
      for (int e = 1; e < kVec; ++e) of_word = fmaxf(of_word, x[e]);
      words()[i / kVec] = key_of(of_word);
      largest = fmaxf(largest, of_word);
      smallest = fminf(smallest, of_word);
    });
    share_extremes(key_of(smallest), key_of(largest));
    const uint32_t least = shared_.least;
    most_ = shared_.most;
    __syncthreads();  // gather() changes the shared ones
    if (cut_.min_weight != 0) {
      min_p_depth_ = this->depth_of_min_p(cut_.min_weight);
      bound_ = sampling::value_of(most_) - min_p_depth_;
    }
    if (top_k_ > kMostStreamedTopK) return true;
    // At least top_k words reach the range's least key, and so top_k elements do. What is far
    // below the largest is taken for one key, so that the other ranges are narrow.
    constexpr int kNumWords = kProbed / kVec;
    constexpr uint32_t kSpan = 1U << 26;  // of keys: eight powers of two
    const uint32_t low = most_ - min(most_ - least, kSpan);
    least_ = low;
    this->find_range(static_cast<uint64_t>(top_k_), 0, [&](const auto& add) {
      for (int w = static_cast<int>(threadIdx.x); w < kNumWords; w += kRowThreads) {
        add(max(words()[w], low), 1U);
      }
    });
    if (least_ == low) least_ = least;
    bound_ = fmaxf(bound_, sampling::value_of(least_));
    return true;
  }

  /// Goes on after the tries. If top-p keeps the token of one, only the mass of all that top-p
  /// keeps is still to be found, for the log-probability. If it drops them all, the token is to be
  /// drawn from what top-p keeps.
  __device__ void take_over(const TriedRow& tried) {
    is_tried_ = true;
    token_ = tried.tried == Tried::kKept ? tried.token : 0;
    bins_ = tried.bins;
    total_ = tried.total;
    mass_above_bins_ = tried.mass_of_listed;
    if (threadIdx.x == 0) {
      list_.counted.bins[ValueBins::kBins - 1] = 0;  // what is listed
      shared_.most = key_of(tried.largest);
      shared_.random = sampling::random_of_try(p_, row(), sampling::kMostTries).first;
    }
    __syncthreads();
  }

  /// The key of the largest element of each probed word. The memory is that of the lists.
  __device__ uint32_t* words() { return &list_.keys[0][0]; }

  /// Lists the elements that reach the bound, which rises with the largest value where there is
  /// min-p; finds the row's largest value.
  __device__ void gather() {
    float largest = -INFINITY;  // NaN if there is one
    float bound = bound_;
    num_ = 0;
    part_.stream(
        part_.count(),
        [&](const float (&x)[kVec], int i) {
          float of_word = x[0];
#pragma unroll
          for (int e = 1; e < kVec; ++e) of_word = larger_or_nan(of_word, x[e]);
          largest = larger_or_nan(largest, of_word);
          if (__ballot_sync(~0U, of_word >= bound) != 0) list(x, i, bound);
        },
        [&](int /*block*/) {
          if (cut_.min_weight == 0) return;
          const uint32_t most = __reduce_max_sync(~0U, key_of(largest));
          // The other warps of the CTA read it after each of their blocks.
          if (lane_of_thread() == 0) atomicMax(&shared_.most, most);
          const uint32_t of_all = *static_cast<volatile uint32_t*>(&shared_.most);
          bound = fmaxf(bound, sampling::value_of(of_all) - min_p_depth_);
        });
    share_extremes(~0U, key_of(largest));
  }

  float min_p_depth_ = 0.0F;  // below the largest value, what min-p may keep
};

}  // namespace flashplan::cuda
