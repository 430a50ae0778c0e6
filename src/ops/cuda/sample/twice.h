// SPDX-License-Identifier: Apache-2.0
// Draws from a row by reading it twice, where the filters may keep more elements than a list holds.
// The first reading counts the elements by bins of values; the counts show in which range the
// threshold of the filter is. The second reading lists the elements of that range, and sums the
// weights above it by blocks.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/listed.h"

namespace flashplan::cuda {

template <DType kDType>
class SampleTwice : protected SampleListed<kDType> {
  using Base = SampleListed<kDType>;

 public:
  using Base::Base;

 protected:
  using Base::cut_;
  using Base::find_kept;
  using Base::finish_lists;
  using Base::kept_weight_of;
  using Base::kVec;
  using Base::least_;
  using Base::list;
  using Base::list_;
  using Base::most_;
  using Base::num_;
  using Base::num_listed_;
  using Base::p_;
  using Base::part_;
  using Base::scale_;
  using Base::shared_;
  using Base::sum_of_cta;
  using Base::top_k_;
  using Base::weight_in;
  using Base::weight_of_tie;
  using Base::write_token;

  /// Counts the elements by bin; finds the row's largest value, which is not far above
  /// shared_.most.
  __device__ void count() {
    bins_ = ValueBins::of_counts(sampling::value_of(shared_.most), scale_.factor);
    clear(list_.counted.bins);
    __syncthreads();
    float largest = -INFINITY;  // NaN if there is one
    part_.stream(part_.count(), [&](const float (&x)[kVec], int /*i*/) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        largest = larger_or_nan(largest, x[e]);
        bins_.add(list_.counted.bins, x[e]);
      }
    });
    this->share_extremes(~0U, key_of(largest));
  }

  /// Whether the bins have a range of values, so that find_range_of_bins() may be called. They have
  /// none if their base is -infinity, as it is where the row's first elements all are.
  __device__ bool has_range() const { return ValueBins::is_place(bins_.place_of(scale_.largest)); }
  /// A range of values that has the threshold of top-k, or that of top-p if masses are known but
  /// for a factor of `slack`. A weight is within 0.14 % of that of the middle of its bin, and sums
  /// of many weights are much nearer.
  __device__ Range find_range_of_bins(float slack) {
    const bool by_mass = top_k_ >= p_.vocab;
    const float place_of_largest = bins_.place_of(scale_.largest);
    const int first = first_bin(static_cast<int>(threadIdx.x));
    const auto amount_of = [&](int b) {
      if (b < 0) return uint64_t{0};
      if (!by_mass) return uint64_t{list_.counted.bins[b]};
      return static_cast<uint64_t>(bins_.mass(list_.counted.bins[b], b, place_of_largest));
    };
    uint64_t own = 0;
#pragma unroll 1
    for (int b = first; b > first - kBinsOfThread; --b) own += amount_of(b);
    if (threadIdx.x == 0) shared_.selected[0] = shared_.selected[1] = 0;
    const SumsOfCta sums = sums_of_cta(own, shared_.warp_values);
    const uint64_t begin = mass_above_bins_ + sums.before;
    const double of_row = total_ != 0 ? bins_.mass_of_row(total_) : static_cast<double>(sums.all);
    const double wanted = by_mass ? double{shared_.top_p} * of_row : top_k_;
    const double factor = by_mass ? slack : 1.0;
    const double of_ends[2] = {wanted / factor, wanted * factor};
#pragma unroll 1
    for (int end = 0; end < 2; ++end) {
      const bool is_above = threadIdx.x == 0 && static_cast<double>(begin) >= of_ends[end];
      if (is_above) shared_.selected[end] = ValueBins::kBins - 1;  // the end is above all bins
      if (!(static_cast<double>(begin) < of_ends[end] &&
            of_ends[end] <= static_cast<double>(begin + own))) {
        continue;
      }
      uint64_t reached = begin;
      int b = first;
      for (;; --b) {
        reached += amount_of(b);
        if (static_cast<double>(reached) >= of_ends[end]) break;
      }
      shared_.selected[end] = static_cast<uint32_t>(b);
    }
    __syncthreads();
    const auto high = static_cast<int>(shared_.selected[0]);
    const auto low = static_cast<int>(shared_.selected[1]);
    __syncthreads();
    return {
        low == 0 ? -INFINITY : bins_.value_of(static_cast<float>(low) - 0.1F),
        high == ValueBins::kBins - 1 ? INFINITY : bins_.value_of(static_cast<float>(high) + 1.1F)};
  }

  /// Reads the row a second time: sums the weights above the range by blocks, and lists the
  /// elements in it. Then draws and writes the token. Returns false if the threshold is not in the
  /// range, or if the range has more elements than the lists hold. `kByCount`: the threshold is
  /// that of top-k.
  template <bool kByCount>
  __device__ bool draw_from_row(const Range& range) {
    constexpr int kBlock = RowPart<kDType, false>::kBlock;
    const int num_blocks = (part_.count() + kBlock - 1) / kBlock;
    if (num_blocks > StreamList::kMostBlocks) return false;
    num_ = 0;
    uint64_t all = 0;       // mass
    uint64_t above = 0;     // the range
    uint64_t of_block = 0;  // of `above`
    uint32_t num_above = 0;
    part_.stream(
        part_.count(),
        [&](const float (&x)[kVec], int i) {
          bool any_in = false;
#pragma unroll
          for (int e = 0; e < kVec; ++e) {
            const uint32_t weight = kept_weight_of(x[e], cut_);
            const bool is_above = x[e] >= range.high;
            all += weight;
            of_block += is_above ? weight : 0U;
            if (kByCount) num_above += is_above && i + e < part_.count() ? 1U : 0U;
            any_in = any_in || (!is_above && x[e] >= range.low);
          }
          if (__ballot_sync(~0U, any_in) != 0) list(x, i, range.low, range.high);
        },
        [&](int block) {
          const uint64_t sum = sum_of_warp(of_block);
          if (lane_of_thread() == 0) list_.masses[block] = sum;
          above += of_block;
          of_block = 0;
        });
    all = sum_of_cta(all);
    above = sum_of_cta(above);
    const uint64_t count_above = kByCount ? sum_of_cta(num_above) : 0;
    if (!finish_lists()) return false;
    if (range.high > -INFINITY && !find_cut(all, above, count_above)) return false;
    const auto listed = find_kept();
    const uint64_t total = above + listed.mass;
    if (token_ != 0) {
      const auto id = static_cast<uint32_t>(token_);
      const uint32_t weight = weight_in(listed, static_cast<uint32_t>(token_ >> 32), id);
      if (threadIdx.x == 0) write_token(id, weight, total);
      return true;
    }
    this->for_each([&](uint32_t key, uint32_t id) {
      const uint32_t weight = weight_in(listed, key, id);
      if (weight != 0) atomicAdd(&list_.masses[id / kBlock], static_cast<Mass>(weight));
    });
    __syncthreads();
    if (warp_of_thread() != 0) return true;
    uint64_t target = sampling::high_product(shared_.random, total);
    const int block = find_block(num_blocks, &target);
    bool is_found = false;
    uint32_t token = 0;
    uint32_t weight = 0;  // of the token, in the thread that has it
    part_.read_block(block, [&](const float (&x)[kVec], int i) {
      uint32_t weights[kVec];
      uint64_t own = 0;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        weights[e] = weight_in(listed, key_of(x[e]), static_cast<uint32_t>(i + e));
        own += weights[e];
      }
      const uint64_t passed = sum_to_lane(own);
      uint64_t before = passed - own;
      const uint64_t sum = __shfl_sync(~0U, passed, 31);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const bool is_token = !is_found && before <= target && target < before + weights[e];
        if (is_token) token = static_cast<uint32_t>(i + e);
        if (is_token) weight = weights[e];
        before += weights[e];
      }
      is_found = is_found || target < sum;
      target -= is_found ? 0 : sum;
    });
    if (weight != 0) write_token(token, weight, total);
    return true;
  }

  /// The cut of top-k or top-p, whose threshold is a candidate.
  __device__ bool find_cut(uint64_t all, uint64_t above, uint64_t count_above) {
    least_ = 1;
    most_ = shared_.most;
    if (top_k_ < p_.vocab) {
      const auto wanted = static_cast<uint64_t>(top_k_);
      if (count_above >= wanted || count_above + static_cast<uint64_t>(num_listed_) < wanted) {
        return false;
      }
      const uint64_t count = this->find_key(wanted, count_above, this->template amounts<false>());
      cut_ = {least_, static_cast<uint32_t>(wanted - count), cut_.min_weight};
      return true;
    }
    const uint64_t wanted = sampling::part_of(shared_.top_p, all);
    if (above >= wanted || above + this->mass_above_cut() < wanted) return false;
    above = this->find_key(wanted, above, this->template amounts<true>());
    cut_ = {least_, 1, cut_.min_weight};
    cut_.num_ties = sampling::ties_to_reach(wanted, above, weight_of_tie(cut_));
    return true;
  }

  /// The first block at which the masses pass *target, from which those before are taken. One warp.
  __device__ int find_block(int num_blocks, uint64_t* target) const {
    int block = 0;
#pragma unroll 1
    for (; block + 32 < num_blocks; block += 32) {
      const uint64_t sum = sum_of_warp(list_.masses[block + lane_of_thread()]);
      if (*target < sum) break;
      *target -= sum;
    }
    const int own = block + lane_of_thread();
    const uint64_t mass = own < num_blocks ? list_.masses[own] : 0;
    const uint64_t passed = sum_to_lane(mass);
    const unsigned lanes = __ballot_sync(~0U, passed > *target);
    const int lane = lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1 : 0;
    *target -= __shfl_sync(~0U, passed - mass, lane);
    return block + lane;
  }

  ValueBins bins_;
  bool is_tried_ = false;  // see SampleStream::take_over()
  uint64_t token_ = 0;     // key, id; 0: not known
  uint64_t total_ = 0;     // mass of the row, if it is known, where the largest value weighs 2^30
  uint64_t mass_above_bins_ = 0;
};

}  // namespace flashplan::cuda
