// SPDX-License-Identifier: Apache-2.0
// sample() with top-p alone, of a row that a CTA reads once. Tokens are drawn as if there were no
// filter (see "Draws with top-p alone" in ops/sampling_math.h). While the CTA reads the row, it
// adds the weights of elements up by bins of values, which nearly always tell whether top-p keeps a
// token.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/plain_row.h"
#include "ops/cuda/sample_list.h"

namespace flashplan::cuda {

constexpr int kBinsOfThread = (ValueBins::kBins - 1) / kRowThreads + 1;
/// A thread has kBinsOfThread bins, from its first one down. The first thread has the last bins.
__device__ inline int first_bin(int thread) {
  return ValueBins::kBins - 1 - thread * kBinsOfThread;
}

/// All threads of the CTA call it; a barrier is inside.
__device__ inline void clear(uint32_t (&bins)[ValueBins::kBins]) {
#pragma unroll 1
  for (int b = static_cast<int>(threadIdx.x); b < ValueBins::kBins; b += kRowThreads) bins[b] = 0;
  __syncthreads();
}

enum class Tried : uint8_t {
  kWritten,    // the token
  kUndecided,  // shared.tokens has the tokens of all tries
  kError,      // of the row or its parameters
};

template <DType kDType>
class SampleCounted : PlainRow<kDType, false> {
  using Base = PlainRow<kDType, false>;

 public:
  __device__ SampleCounted(const SampleParams& p, int32_t row, SampleShared& shared,
                           StreamList& list)
      : Base(p, row, shared.plain_entries), shared_(shared), list_(list) {}

  /// Leaves in list.bins the sums of bins(), and in shared.most the key of the row's largest value.
  __device__ Tried run() {
    this->start_reading();
    choose_bins();
    this->read(
        [&](const float (&x)[kVec]) {
#pragma unroll
          for (int e = 0; e < kVec; ++e) bins_.add(list_.bins, x[e]);
        },
        [&](int block, uint64_t entry) {
          if (lane_of_thread() == 0) entries_[block] = entry;
          const float largest = sampling::value_of(static_cast<uint32_t>(entry >> 32));
          if (bins_.is_in_last(largest)) list_above(block);
        });
    __syncthreads();
    if (this->find_largest() != SampleError::kNone) return Tried::kError;
    if (threadIdx.x == 0) shared_.most = key_of(scale_.largest);
    place_of_largest_ = bins_.place_of(scale_.largest);
    if (threadIdx.x == 0) list_.bins[ValueBins::kBins - 1] = 0;  // these elements are listed
    __syncthreads();
    sum_bins();
    const int warp = warp_of_thread();
#pragma unroll 1
    for (int begin = 0; begin < kMostTries && p_.logprobs == nullptr; begin += kTriesAtOnce) {
      if (warp < kTriesAtOnce) judge(draw_try(begin + warp));
      __syncthreads();
#pragma unroll 1
      for (int t = 0; t < kTriesAtOnce; ++t) {
        const uint32_t verdict = shared_.verdicts[t];
        if (verdict == kDropped) continue;
        if (verdict == kUnknown) begin = kMostTries;
        if (verdict == kKept && threadIdx.x == 0) {
          const auto id = static_cast<int32_t>(shared_.tokens[t]);
          write_result(p_, row_, id, 0.0F, SampleError::kNone);
        }
        if (verdict == kKept) return Tried::kWritten;
        break;
      }
      __syncthreads();
    }
    draw_try(warp);
    __syncthreads();
    return Tried::kUndecided;
  }

  __device__ const ValueBins& bins() const { return bins_; }
  /// The mass of the row, in units of which its largest value weighs 2^30. Known after a draw.
  __device__ uint64_t total() const { return total_; }
  /// The mass of what lies above the bins, in their units.
  __device__ uint64_t mass_of_listed() const { return sum_of_warp(mass_of_lane()); }

 private:
  using Base::entries_;
  using Base::kBlock;
  using Base::kVec;
  using Base::p_;
  using Base::part_;
  using Base::row_;
  using Base::scale_;

  static constexpr int kMostTries = static_cast<int>(sampling::kMostTries);
  static constexpr int kTriesAtOnce = 4;
  static_assert(kMostTries % kTriesAtOnce == 0 && kMostTries == kRowWarps);
  static constexpr uint32_t kDropped = 0;
  static constexpr uint32_t kKept = 1;
  static constexpr uint32_t kUnknown = 2;

  /// Chooses bins from the first elements of the row, and clears them.
  __device__ void choose_bins() {
    float largest = this->largest_loaded();
    if (!part_.has_words(0, kBlock)) {
      largest = part_.at(min(static_cast<int>(threadIdx.x), part_.count() - 1));
    }
    const uint32_t key = __reduce_max_sync(~0U, key_of(largest));
    if (lane_of_thread() == 0) shared_.warp_keys[warp_of_thread()][0] = key;
    if (threadIdx.x == 0) list_.num_above = 0;
    clear(list_.bins);
    const int lane = lane_of_thread();
    const uint32_t key_of_warp = lane < kRowWarps ? shared_.warp_keys[lane][0] : 0;
    const float base = sampling::value_of(__reduce_max_sync(~0U, key_of_warp));
    bins_ = ValueBins::of_weights(base, scale_.factor, p_.vocab);
  }

  /// Lists those elements of a block that are in the last bin. One warp calls it.
  __device__ void list_above(int block) {
#pragma unroll 1
    for (int e = lane_of_thread(); e < kBlock; e += 32) {
      const int i = block * kBlock + e;
      if (i >= part_.count() || !bins_.is_in_last(part_.at(i))) continue;
      const uint32_t place = atomicAdd(&list_.num_above, 1U);
      if (place >= 32) continue;
      list_.above[place] = uint64_t{key_of(part_.at(i))} << 32 | ~static_cast<uint32_t>(i);
    }
  }
  /// The listed element of this lane, or 0. An element that comes before another one, as it is
  /// larger or has a smaller id, is the larger number.
  __device__ uint64_t listed_of_lane() const {
    const auto lane = static_cast<uint32_t>(lane_of_thread());
    return lane < list_.num_above ? list_.above[lane] : 0;
  }
  __device__ uint64_t mass_of_lane() const {
    const uint64_t listed = listed_of_lane();
    if (listed == 0) return 0;
    const float value = sampling::value_of(static_cast<uint32_t>(listed >> 32));
    return static_cast<uint64_t>(bins_.mass_of_row(sampling::weight_of_logit(value, scale_)));
  }

  /// Draws the token of a try, and leaves it in shared_.tokens for this warp's threads.
  __device__ uint64_t draw_try(int index) {
    uint64_t& token = shared_.tokens[warp_of_thread()];
    const auto random = sampling::random_of_try(p_, row_, static_cast<uint32_t>(index));
    const auto chosen = this->choose(random);
    total_ = chosen.total;
    this->draw_from(chosen, [&](int32_t id, uint32_t, const WeighedBlock&) {
      token = uint64_t{key_of(part_.at(id))} << 32 | static_cast<uint32_t>(id);
    });
    __syncwarp();
    return token;
  }

  __device__ uint64_t mass_of_bin(int bin) const {
    return static_cast<uint64_t>(bins_.mass(list_.bins[bin], bin, place_of_largest_));
  }

  /// Leaves in masses_above() the mass above the bins of each thread.
  __device__ void sum_bins() {
    constexpr float kBelow = 0.997296056F;  // 2^(-1 / kOfOctave)
    const int first = first_bin(static_cast<int>(threadIdx.x));
    float unit = bins_.mass(1U, first, place_of_largest_);
    float sum = 0.0F;
#pragma unroll 1
    for (int b = first; b > max(first - kBinsOfThread, -1); --b) {
      sum += static_cast<float>(list_.bins[b]) * unit;
      unit *= kBelow;
    }
    masses_above()[threadIdx.x] =
        sums_of_cta(static_cast<uint64_t>(sum), shared_.warp_values).before;
    __syncthreads();
  }
  __device__ Mass* masses_above() { return list_.masses; }

  /// Leaves in shared_.verdicts, for this warp, whether top-p keeps its token: whether the mass of
  /// what comes before it is less than top_p of all.
  __device__ void judge(uint64_t token) {
    const float value = sampling::value_of(static_cast<uint32_t>(token >> 32));
    const int bin = bins_.bin_of(value);
    const int thread = (ValueBins::kBins - 1 - bin) / kBinsOfThread;
    const int own = first_bin(thread) - lane_of_thread();
    // The mass of what comes before the token is at least `least` and at most `most`. Of the listed
    // elements, which are above all bins, it is known which come before.
    const bool is_listed = bin == ValueBins::kBins - 1;
    const uint64_t order = token ^ 0xffffffffU;
    uint64_t least = sum_of_warp(!is_listed || listed_of_lane() > order ? mass_of_lane() : 0);
    uint64_t most = least;
    if (!is_listed) {
      const uint32_t others = list_.bins[bin] - bins_.amount_of(value);
      least += masses_above()[thread] + sum_of_warp(own > bin ? mass_of_bin(own) : 0);
      most = least + static_cast<uint64_t>(bins_.mass(others, bin, place_of_largest_));
    }
    // The weights that decide are rounded to 1 / kOne of the largest one.
    const double rounding = bins_.mass_of_row(static_cast<uint64_t>(p_.vocab) / 2 + 2);
    const double error = bins_.error();
    const double all = bins_.mass_of_row(total_);
    const double top_p = p_.top_p.of(row_);
    uint32_t verdict = kUnknown;
    if (static_cast<double>(most) * (1 + error) + rounding <
        top_p * (all * (1 - error) - rounding)) {
      verdict = kKept;
    }
    if (static_cast<double>(least) * (1 - error) - rounding >
        top_p * (all * (1 + error) + rounding)) {
      verdict = kDropped;
    }
    if (list_.num_above > 32) verdict = kUnknown;
    if (lane_of_thread() == 0) shared_.verdicts[warp_of_thread()] = verdict;
  }

  ValueBins bins_;
  SampleShared& shared_;
  StreamList& list_;
  float place_of_largest_ = 0.0F;
  uint64_t total_ = 0;
};

struct TriedRow {
  Tried tried;
  ValueBins bins;
  uint64_t total;  // these two: see SampleCounted
  uint64_t mass_of_listed;
};
/// A function of its own, as draw_plain().
template <DType kDType>
__device__ __noinline__ TriedRow draw_by_tries(const SampleParams& p, int32_t row,
                                               SampleShared& shared, StreamList& list) {
  SampleCounted<kDType> sample(p, row, shared, list);
  const Tried tried = sample.run();
  return {tried, sample.bins(), sample.total(), sample.mass_of_listed()};
}

}  // namespace flashplan::cuda
