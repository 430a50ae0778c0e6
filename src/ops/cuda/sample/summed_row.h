// SPDX-License-Identifier: Apache-2.0
// A row that a cluster of CTAs reads once. Each CTA sums up the weights of its part by bins of
// values while it reads the part.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/plain_row.h"
#include "ops/cuda/sample/value_bins.h"

namespace flashplan::cuda {

constexpr int kValueBins = ValueBins<false>::kBins;
static_assert(kValueBins == ValueBins<true>::kBins);
constexpr int kBinsOfThread = (kValueBins - 1) / kRowThreads + 1;
/// A thread has kBinsOfThread bins, from its first one down. The first thread has the last bins.
__device__ inline int first_bin(int thread) { return kValueBins - 1 - thread * kBinsOfThread; }

/// The largest error of a row's mass, in the units of its bins, that comes from the rounding of
/// weights to multiples of 1 / sampling::kOne of the largest weight.
template <bool kFromProbs>
__device__ double rounding_of_row(int32_t vocab, float largest) {
  const double of_weights =
      ValueBins<kFromProbs>::mass_of_row(static_cast<uint64_t>(vocab) / 2 + 2);
  return of_weights * (kFromProbs ? largest : 1.0F);
}

constexpr int kTriesAtOnce = 4;

/// How many elements of the last bin a list has room for. The other bins reach at least up to the
/// largest of the elements that a CTA reads first, a fourteenth of a row of 128,256 elements. If
/// the order of elements is random, only 5 of 10^9 rows have more than 256 larger elements.
constexpr int kMostAboveBins = 256;

/// The shared memory of a CTA, at the same place in all CTAs of a cluster.
struct CountedShared {
  PlainShared plain;
  Mailbox bounds_mail[2];                                          // for even and odd exchanges
  alignas(8) uint32_t bins[kValueBins + ValueBins<false>::kRest];  // sums of this CTA's part
  float above[kRowThreads];  // the mass above the bins of each thread
  float warp_sums[kRowWarps];
  uint64_t listed[kMostAboveBins];  // keys and ids of the elements of the last bin
  uint64_t groups[kGroups];         // sums of groups of bins (find_bin())
  uint32_t num_listed;  // elements of the last bin, also those without a place in `listed`
  sampling::RandomPair randoms[sampling::kMostTries];
  uint64_t tokens[kTriesAtOnce];  // key and, in the low half, id of each tried token
  uint32_t verdicts[kTriesAtOnce];
  alignas(16) uint64_t bounds[2][kMaxCluster][2 * kTriesAtOnce];  // of two exchanges, by CTA, try
};

template <DType kDType, bool kFromProbs>
class SummedRow : protected PlainRow<kDType, kFromProbs> {
  using Base = PlainRow<kDType, kFromProbs>;

 public:
  __device__ SummedRow(const SampleParams& p, int32_t row, CountedShared& shared)
      : Base(p, row, shared.plain), shared_(shared) {}

 protected:
  using Values = ValueBins<kFromProbs>;
  using Base::elements_;
  using Base::is_greedy_;
  using Base::kBlock;
  using Base::kVec;
  using Base::p_;
  using Base::row_;
  using Base::scale_;
  using Base::total_;
  static constexpr int kMostTries = static_cast<int>(sampling::kMostTries);
  static constexpr int kLastSummed = Values::kBins - 2;  // elements of the last bin are listed

  /// Waits for the entries of all blocks and weighs the row. Returns the error of the parameters or
  /// of the row.
  __device__ SampleError find_error() {
    const SampleError error = this->receive_entries();
    if (error != SampleError::kNone) return error;
    exact_ = kFromProbs ? sampling::make_scale(scale_.largest, 1.0F, true) : scale_;
    place_of_largest_ = bins_.place_of(scale_.largest);
    this->weigh_entries();
    const bool is_distribution = !kFromProbs || sampling::masses_sum_to_one(total_);
    return is_distribution ? SampleError::kNone : SampleError::kProbabilities;
  }

  /// Reads the CTA's part, and sums up its weights by bins.
  __device__ void read_row() {
    if (threadIdx.x == 0) {
      for (Mailbox& mail : shared_.bounds_mail) mail.init();
      this->init_mail();
    }
    cluster_arrive_relaxed();
    this->start_reading();
    if (threadIdx.x < kMostTries) {
      shared_.randoms[threadIdx.x] = sampling::random_of_try(p_, row_, threadIdx.x);
    }
    choose_bins();
    cluster_wait();  // all CTAs have begun: their shared memory can be written to
    this->read([&](const float (&x)[kVec]) { add_to_bins(x); },
               [&](int block, const WeighedBlock& weighed) {
                 is_flat_ = weighed.sum > kFlat;
                 if (Base::OfWarp::value_of(weighed.key) >= least_of_last_) list_last(block);
               });
    __syncthreads();
    sum_bins();
  }

  /// Clears the bins while the first elements are being loaded. Then chooses the range of values of
  /// the bins from these elements.
  __device__ void choose_bins() {
#pragma unroll 1
    for (int b = static_cast<int>(threadIdx.x); b < kValueBins; b += kRowThreads) {
      shared_.bins[b] = 0;
    }
    if (threadIdx.x == 0) shared_.num_listed = 0;
    const Range loaded = this->range_loaded();
    float largest = loaded.high;
    if (!elements_.has_words(0, kBlock)) {
      largest = elements_.at(min(static_cast<int>(threadIdx.x), p_.vocab - 1));
    }
    float found = sampling::value_of(this->largest_of_cta(key_of(largest)));
    if (found == -INFINITY) {
      __syncthreads();
      found = sampling::value_of(this->largest_of_cta(key_of(largest_of_some())));
    }
    const float base = found > -INFINITY ? found : 0.0F;  // 0 for a CTA without a part
    bins_ = Values(base, is_greedy_ ? 1.0F : scale_.factor);
    place_of_base_ = bins_.place_of(base);
    least_of_last_ = bins_.least_of_last();
    const bool is_same = bins_.bin_of(loaded.low) == bins_.bin_of(loaded.high);
    is_flat_ = __ballot_sync(~0U, is_same) == ~0U;
  }

  /// The largest of some elements of the CTA's part that this thread reads, for rows whose first
  /// elements are masked.
  __device__ float largest_of_some() const {
    constexpr int kStep = 64;
    const int end = min(this->end_block_ * kBlock, p_.vocab);
    float largest = -INFINITY;
#pragma unroll 6
    for (int i = this->first_block_ * kBlock + static_cast<int>(threadIdx.x) * kStep; i < end;
         i += kRowThreads * kStep) {
      largest = fmaxf(largest, elements_.at(i));
    }
    return largest;
  }

  /// Adds elements to the bins; all threads of the warp call it. Atomics on one bin wait for each
  /// other. If the elements of the warp's previous block were about equal, those of this one
  /// probably are, too: if all that the warp adds here are in one bin, one thread adds their sum.
  __device__ void add_to_bins(const float (&x)[kVec]) {
    uint32_t parts[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) parts[e] = bins_.part_of(x[e]);
    if (is_flat_) {
      const int bin = Values::bin_of_part(parts[0]);
      bool is_same = bin == __shfl_sync(~0U, bin, 0);
      uint32_t sum = 0;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        is_same = is_same && Values::bin_of_part(parts[e]) == bin;
        sum += bins_.amount_of_part(parts[e]);
      }
      if (__ballot_sync(~0U, is_same) == ~0U) {
        sum = __reduce_add_sync(~0U, sum);
        if (lane_of_thread() == 0 && bin != 0) atomicAdd(&shared_.bins[bin], sum);
        return;
      }
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      Values::add(shared_.bins, parts[e], kValueBins + lane_of_thread());
  }

  /// Lists those elements of a block that are in the last bin. All lanes of a warp call it. Few
  /// blocks have such elements, so it loads the block again: a test of each element where read()
  /// loads it first would be most of the code of its loop.
  __device__ void list_last(int block) {
    const int first = block * kBlock + Base::OfWarp::first_of(0);
    uint32_t in_last = 0;  // a bit for each element of the thread
    const auto note = [&](const float (&x)[kVec], int u) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        in_last |= (bins_.is_in_last(x[e]) ? 1U : 0U) << (u * kVec + e);
      }
    };
    if (elements_.has_words(block * kBlock, kBlock)) {
      Word<kDType, kVec> words[Base::kWords];
#pragma unroll
      for (int u = 0; u < Base::kWords; ++u) words[u] = elements_.words_at(first)[u * 32];
#pragma unroll
      for (int u = 0; u < Base::kWords; ++u) {
        float x[kVec];
        unpack<kDType, kVec>(words[u], x);
        note(x, u);
      }
    } else {
#pragma unroll 1
      for (int u = 0; u < Base::kWords; ++u) {
        float x[kVec];
        this->read_elements(block, u, x);
        note(x, u);
      }
    }
#pragma unroll 1
    for (; in_last != 0; in_last &= in_last - 1) {
      const int n = __ffs(static_cast<int>(in_last)) - 1;
      const int id = first + n / kVec * 32 * kVec + n % kVec;
      const uint32_t place = atomicAdd(&shared_.num_listed, 1U);
      if (place >= kMostAboveBins) continue;
      shared_.listed[place] = uint64_t{key_of(elements_.at(id))} << 32 | ~static_cast<uint32_t>(id);
    }
  }
  /// The mass of the listed elements for which key << 32 | ~id is larger than `order`. With this
  /// number of an element as `order`, they are those before it: larger ones, and equal ones with
  /// smaller ids. All threads of a warp call it.
  __device__ uint64_t listed_mass_before(uint64_t order) const {
    const int num = min(static_cast<int>(shared_.num_listed), kMostAboveBins);
    uint64_t mass = 0;
#pragma unroll 1
    for (int c = lane_of_thread(); c < num; c += 32) {
      const float value = sampling::value_of(static_cast<uint32_t>(shared_.listed[c] >> 32));
      const uint32_t weight = sampling::weight_of_logit(value, exact_);
      mass += shared_.listed[c] > order ? static_cast<uint64_t>(bins_.mass_of_row(weight)) : 0;
    }
    return sum_of_warp(mass);
  }

  /// Stores in shared_.above, for each thread, the mass of all bins above those of the thread. It
  /// is relative to the base, since the row's largest value may be in another CTA's part and is not
  /// known yet. A barrier must come before it is read.
  __device__ void sum_bins() {
    const float below = bins_.unit_in(0.0F, 1.0F);  // unit of the bin below / unit of a bin
    const int end = max(first_bin(static_cast<int>(threadIdx.x)) - kBinsOfThread, -1);
    const int first = min(first_bin(static_cast<int>(threadIdx.x)), kLastSummed);
    float unit = bins_.mass(1U, first, place_of_base_);
    float own = 0.0F;
#pragma unroll 2
    for (int b = first; b > end; --b) {
      if (kFromProbs) unit = bins_.mass(1U, b, 0.0F);
      own += static_cast<float>(shared_.bins[b]) * unit;
      unit *= below;
    }
    const int lane = lane_of_thread();
    const float to_lane = sum_to_lane<float>(own);
    const float before_lane = __shfl_up_sync(~0U, to_lane, 1);
    if (lane == 31) shared_.warp_sums[warp_of_thread()] = to_lane;
    __syncthreads();
    float above = lane > 0 ? before_lane : 0.0F;
#pragma unroll 1
    for (int w = 0; w < warp_of_thread(); ++w) above += shared_.warp_sums[w];
    shared_.above[threadIdx.x] = above;
  }
  __device__ uint64_t mass_of_bin(int bin) const {
    return static_cast<uint64_t>(bins_.mass(shared_.bins[bin], bin, place_of_largest_));
  }

  __device__ uint32_t weight_of(float x) const {
    return kFromProbs ? sampling::weight_of_probability(x, exact_)
                      : sampling::weight_of_logit(x, exact_);
  }

  CountedShared& shared_;
  Values bins_;
  sampling::Scale exact_{};  // scale of the weights that filters compare
  float place_of_base_ = 0.0F;
  float place_of_largest_ = 0.0F;

 private:
  // A block that weighs more than this is about flat: its elements are about equal. Elements are
  // weighed relative to the largest of their block, so a block of equal elements weighs the most,
  // and this is half of that (for probabilities: half of the least that it may be).
  static constexpr uint64_t kFlat = uint64_t{kBlock} << (kFromProbs ? 25 : 26);

  float least_of_last_ = 0.0F;  // all elements of the last bin are at least this value
  bool is_flat_ = false;        // the warp's previous block (at first: its first) is about flat
};

}  // namespace flashplan::cuda
