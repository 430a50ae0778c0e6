// SPDX-License-Identifier: Apache-2.0
// The candidates for the threshold of a filter of sample(): the elements of a row in a range of
// values, in lists that each CTA of the row's cluster has of all of them.
#pragma once

#include <cstdint>

#include "ops/cuda/sample_row.h"

namespace flashplan::cuda {

/// A range of values or of the numbers that the first histogram divides; of these the high one is
/// not in it.
struct Range {
  float low;
  float high;
};

template <DType kDType, bool kFromProbs, bool kHeld>
class SampleCandidates : protected SampleRow<kDType, kFromProbs, kHeld> {
  using Base = SampleRow<kDType, kFromProbs, kHeld>;

 public:
  using Base::Base;

 protected:
  using Base::part_;
  using Base::publish;
  using Base::read;
  using Base::scale_;
  using Base::shared_;
  using Base::step_;
  using Base::value_of_rank;

  /// Puts the elements of a range of positions, or of values from the low to the high one, in the
  /// lists of all CTAs, and tells these the CTA's mass above. After it least_ and most_ are the
  /// range's smallest and largest key, and has_too_many_ whether a CTA has more than its share of
  /// the lists.
  template <bool kByValue>
  __device__ void gather(const Range& range) {
    const int share = share_of_rank();
    uint32_t* own = shared_.candidates + cluster_rank() * share;
    if (threadIdx.x == 0) {
      shared_.num_candidates = 0;
      shared_.least = ~0U;
      shared_.most = 0;
      shared_.num_kept = 0;
      shared_.selected[0] = shared_.selected[1] = ~0U;
      shared_.count_above = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < part_.count(); i += kRowThreads * 4) {
      float x[4];
      bool is_in[4];
      read(i, x);
      if (kByValue && !(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) >= range.low)) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) is_in[e] = is_in_range<kByValue>(x[e], range);
      if (!(is_in[0] || is_in[1] || is_in[2] || is_in[3])) continue;
      unsigned left = 0;  // bits of the elements
#pragma unroll
      for (int e = 0; e < 4; ++e) left |= is_in[e] ? 1U << e : 0U;
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int e = __ffs(static_cast<int>(left)) - 1;
        if (i + e >= part_.count()) break;
        const uint32_t place = atomicAdd(&shared_.num_candidates, 1U);
        if (place >= static_cast<uint32_t>(share)) break;
        own[place] = key_of(e == 0 ? x[0] : e == 1 ? x[1] : e == 2 ? x[2] : x[3]);
      }
    }
    __syncthreads();
    const auto num_own = static_cast<int>(shared_.num_candidates);  // or fewer, if not all fit
    const bool fits = num_own <= share;
    if (!fits) find_extremes<kByValue>(range);
    const int num_sent = fits ? (num_own + 3) / 4 * 4 : 0;  // whole words
    const int lane = lane_of_thread();
#pragma unroll 1
    for (int rank = warp_of_thread(); rank < cluster_size(); rank += kRowWarps) {
#pragma unroll 1
      for (int c = lane; c < num_sent; c += 32) {
        if (c >= num_own) {
          *shared_of(own + c, rank) = 0;
        } else if (rank != cluster_rank()) {
          *shared_of(own + c, rank) = own[c];
        }
      }
    }
    if (warp_of_thread() == 0) {
      uint32_t least = fits ? ~0U : shared_.least;
      uint32_t most = fits ? 0U : shared_.most;
#pragma unroll 1
      for (int c = lane; c < num_own && fits; c += 32) {
        least = min(least, own[c]);
        most = max(most, own[c]);
      }
      const uint64_t values[kValues] = {static_cast<uint64_t>(num_own),
                                        __reduce_max_sync(~0U, ~least),
                                        __reduce_max_sync(~0U, most), shared_.own_above};
      publish(values);
    }
    cluster_sync();
    ++step_;
    bins_are_read_ = false;
    has_too_many_ = __reduce_max_sync(~0U, static_cast<uint32_t>(value_of_rank(0))) >
                    static_cast<uint32_t>(share);
    least_ = ~__reduce_max_sync(~0U, static_cast<uint32_t>(value_of_rank(1)));
    most_ = __reduce_max_sync(~0U, static_cast<uint32_t>(value_of_rank(2)));
  }

  template <bool kByValue>
  __device__ bool is_in_range(float x, const Range& range) const {
    if (kByValue) return x >= range.low && x <= range.high;
    const float position = position_of(x);
    return position >= range.low && position < range.high;
  }

  /// Leaves in shared_.least and shared_.most those of the part's elements in a range.
  template <bool kByValue>
  __device__ void find_extremes(const Range& range) {
    uint32_t least = ~0U;
    uint32_t most = 0;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < part_.count(); i += kRowThreads) {
      const float x = part_.at(i);
      if (!is_in_range<kByValue>(x, range)) continue;
      least = min(least, key_of(x));
      most = max(most, key_of(x));
    }
    least = ~__reduce_max_sync(~0U, ~least);
    most = __reduce_max_sync(~0U, most);
    if (lane_of_thread() == 0) {
      atomicMin(&shared_.least, least);
      atomicMax(&shared_.most, most);
    }
    __syncthreads();
  }

  /// Candidates that the lists have place for, of each CTA of the cluster.
  __device__ int share_of_rank() const {
    return kMaxCandidates >> (__ffs(cluster_size()) - 1);  // it is a power of two
  }

  /// Calls body(key) for the candidates of this thread, which are of all CTAs.
  template <class Body>
  __device__ void for_each_candidate(const Body& body) const {
    const int share = share_of_rank();
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < kMaxCandidates; c += kRowThreads) {
      const int rank = c * cluster_size() / kMaxCandidates;
      if (c - rank * share < num_candidates_of(rank)) {
        body(shared_.candidates[c]);
      }
    }
  }

  __device__ int num_candidates_of(int rank) const {
    return static_cast<int>(shared_.values[(step_ - 1) % 2][rank][0]);
  }

  /// Grows with x; the first histogram divides it: the logit's distance, or the weight of a
  /// probability, whose bits are much like an exponent.
  __device__ float position_of(float x) const {
    if (!kFromProbs) return -sampling::distance(x, scale_);
    return sampling::times(sampling::times_to_one(x, scale_.factor), 1073741824.0F);
  }

  uint32_t least_ = 0;  // of the candidates
  uint32_t most_ = 0;
  bool has_too_many_ = false;   // so the lists do not have all candidates
  bool bins_are_read_ = false;  // by other CTAs, so that they must not be cleared yet
};

}  // namespace flashplan::cuda
