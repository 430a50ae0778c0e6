// SPDX-License-Identifier: Apache-2.0
// Loads a row that the CTAs of a cluster share, and finds what top-k, min-p and top-p keep of it.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/few.h"

namespace flashplan::cuda {

template <DType kDType, bool kFromProbs, bool kHeld>
class SampleFilters : protected SampleFew<kDType, kFromProbs, kHeld> {
  using Base = SampleFew<kDType, kFromProbs, kHeld>;

 public:
  using Base::Base;

 protected:
  using Base::largest_;
  using Base::p_;
  using Base::part_;
  using Base::publish_sums;
  using Base::shared_;
  using Base::sum_segments;
  using Base::value_of_rank;
  using Base::weight_of_tie;

  /// Starts to load the part, and lets the CTAs of the cluster exchange messages. load() is due.
  __device__ void start() {
    part_.start_load(shared_.arrived);
    if (threadIdx.x == 32) {
      for (Mailbox& mailbox : shared_.mail) mailbox.init();
      shared_.lists.init();
      shared_.gathered_mail.init();
      shared_.num_candidates = 0;
      Mailbox::fence_init();
    }
    cluster_arrive_relaxed();
    if (threadIdx.x == 0) this->read_parameters();
  }

  /// Loads the part; finds the row's largest value and what is wrong with the row.
  __device__ SampleError load() {
    float largest = -INFINITY;  // NaN if there is one
    float smallest = INFINITY;
    part_.finish_load(shared_.arrived, [&](float x) {
      largest = larger_or_nan(largest, x);
      if (kFromProbs) smallest = fminf(smallest, x);
    });
    // A thread that has a negative value sends infinity instead of its largest: both are no
    // probabilities, and one message is enough.
    if (kFromProbs && smallest < 0.0F && largest == largest) largest = INFINITY;
    cluster_wait();  // all CTAs have begun: their shared memory can be written to
    this->send_largest(key_of(largest));
    __syncthreads();  // the parameters have been read
    largest_ = sampling::value_of(this->receive_largest());
    if (largest_ != largest_) return SampleError::kNotANumber;
    if (kFromProbs) {
      const bool fits = largest_ > 0.0F && largest_ <= 1.01F;
      return fits ? SampleError::kNone : SampleError::kProbabilities;
    }
    if (largest_ == INFINITY) return SampleError::kNotANumber;
    return largest_ == -INFINITY ? SampleError::kNoToken : SampleError::kNone;
  }

  /// The mass of the row, which top-p counts from now on where filters are joint.
  __device__ uint64_t count_row() {
    sum_segments(sampling::keep_all(0));
    publish_sums();
    const uint64_t all = sum_of_warp(value_of_rank(0));
    if (p_.joint && threadIdx.x == 0) shared_.counted = all;
    return all;
  }

  /// Applies top-k and then top-p to a cut that keeps all but what min-p drops. Returns the mass
  /// that is left, if top-p is below 1. Parameters are read again where they are used, to save
  /// registers.
  __device__ uint64_t apply_filters(Cut* cut) {
    if (shared_.top_k < p_.vocab) {
      const auto threshold = this->template find_threshold<false>(
          cut, [&](uint64_t /*all*/) { return static_cast<uint64_t>(shared_.top_k); });
      cut->num_ties = static_cast<uint32_t>(threshold.wanted - threshold.above);
    }
    if (!(shared_.top_p < 1.0F)) return 0;
    const auto threshold = this->template find_threshold<true>(cut, [&](uint64_t all) {
      const uint64_t kept = all + uint64_t{cut->num_ties} * weight_of_tie(*cut);
      return sampling::wanted_of_top_p(shared_.top_p, kept, shared_.counted);
    });
    const uint32_t tie = weight_of_tie(*cut);
    cut->num_ties = sampling::ties_to_reach(threshold.wanted, threshold.above, tie);
    return threshold.above + uint64_t{cut->num_ties} * tie;
  }
};

/// The bytes of dynamic shared memory that SampleFilters needs for each CTA of a cluster: for what
/// the CTA sends in two steps and for its sums of groups of bins. Clusters of more than kMaxCluster
/// / 2 CTAs also need memory for the bins of one group; in smaller ones that of the candidates
/// serves.
inline int bytes_of_rank(int max_cluster) {
  const int words = max_cluster > kMaxCluster / 2 ? kGroups + kGroupBins : kGroups;
  return kBytesOfRank + words * static_cast<int>(sizeof(uint64_t));
}

/// How launch_rows() divides rows for SampleFilters.
inline RowDivision division_of_rows(int32_t num_rows, Device device) {
  // Few rows: as many CTAs as run at once. Many: fewer barriers for an element.
  const int64_t most = int64_t{kRowCtasOfSm} * device_facts(device.index).num_sms;
  const bool is_large = int64_t{num_rows} * kMaxCluster <= most;
  const int max_cluster = is_large ? kMaxCluster : kMaxCluster / 2;
  return {.max_cluster = max_cluster,
          .bytes_of_rank = bytes_of_rank(max_cluster),
          .multiple = sampling::kBlock};
}

}  // namespace flashplan::cuda
