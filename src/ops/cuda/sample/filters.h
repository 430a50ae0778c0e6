// SPDX-License-Identifier: Apache-2.0
// Loads a row that the CTAs of a cluster share, and finds what top-k, min-p and top-p keep of it.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/few.h"

namespace flashplan::cuda {

/// Starts to load the part, and lets the CTAs of the cluster exchange messages. load_row() must
/// follow.
template <class Row>
__device__ void start_row(Row& row) {
  row.part.start_load(row.shared.arrived);
  if (threadIdx.x == 32) {
    for (Mailbox& mailbox : row.shared.mail) mailbox.init();
    row.shared.lists.init();
    row.shared.gathered_mail.init();
    row.shared.num_candidates = 0;
    Mailbox::fence_init();
  }
  cluster_arrive_relaxed();
  if (threadIdx.x == 0) row.read_parameters();
}

/// Loads the part; finds the row's largest value and what is wrong with the row.
template <class Row>
__device__ SampleError load_row(Row& row) {
  float largest = -INFINITY;  // NaN if there is one
  float smallest = INFINITY;
  row.part.finish_load(row.shared.arrived, [&](float x) {
    largest = larger_or_nan(largest, x);
    if (Row::kIsFromProbs) smallest = fminf(smallest, x);
  });
  // A thread with a negative value reports infinity as its largest value: neither is a probability,
  // and the row's largest value then shows the error without a second message.
  if (Row::kIsFromProbs && smallest < 0.0F && largest == largest) largest = INFINITY;
  cluster_wait();  // all CTAs have begun: their shared memory can be written to
  send_largest(row, key_of(largest));
  __syncthreads();  // the parameters have been read
  row.largest = sampling::value_of(receive_largest(row));
  if (Row::kIsFromProbs) {
    if (row.largest != row.largest) return SampleError::kNotANumber;
    const bool fits = row.largest > 0.0F && row.largest <= 1.01F;
    return fits ? SampleError::kNone : SampleError::kProbabilities;
  }
  return error_of_logits(row.largest);
}

/// Returns the mass of the row. If filters are joint, stores it for top-p, which then keeps a part
/// of this mass.
template <class Row>
__device__ uint64_t count_row(Row& row) {
  sum_segments(row, sampling::keep_all(0));
  row.publish_sums();
  const uint64_t all = sum_of_warp(row.exchange.value_of_rank(0));
  if (row.p.joint && threadIdx.x == 0) row.shared.counted = all;
  return all;
}

/// Applies top-k and then top-p to a cut that keeps all but what min-p drops. Returns the mass that
/// is left, or 0 if top-p is 1. Parameters are read again where they are used, to save registers.
template <class Row>
__device__ uint64_t apply_filters(Row& row, Cut* cut) {
  if (row.shared.top_k < row.p.vocab) {
    const auto threshold = find_threshold<false>(
        row, cut, [&](uint64_t /*all*/) { return static_cast<uint64_t>(row.shared.top_k); });
    cut->num_ties = static_cast<uint32_t>(threshold.wanted - threshold.above);
  }
  if (!(row.shared.top_p < 1.0F)) return 0;
  const auto threshold = find_threshold<true>(row, cut, [&](uint64_t all) {
    const uint64_t kept = all + uint64_t{cut->num_ties} * row.weight_of_tie(*cut);
    return sampling::wanted_of_top_p(row.shared.top_p, kept, row.shared.counted);
  });
  const uint32_t tie = row.weight_of_tie(*cut);
  cut->num_ties = sampling::ties_to_reach(threshold.wanted, threshold.above, tie);
  return threshold.above + uint64_t{cut->num_ties} * tie;
}

/// The bytes of dynamic shared memory that a SampleRow needs for each CTA of a cluster: for what
/// the CTA sends in two exchanges and for its sums of groups of bins. Clusters of more than
/// kMaxCluster / 2 CTAs also need memory for the bins of one group; smaller ones use that of the
/// candidates.
inline int bytes_of_rank(int ctas) {
  const int words = ctas > kMaxCluster / 2 ? kGroups + kGroupBins : kGroups;
  return kBytesOfRank + words * static_cast<int>(sizeof(uint64_t));
}

/// How launch_rows() divides a row into the parts that the CTAs of a cluster keep.
inline RowDivision division_of_row(int ctas) {
  return {.cluster = ctas, .bytes_of_rank = bytes_of_rank(ctas), .multiple = sampling::kBlock};
}

/// Rows get more CTAs than hold them only as long as the launch has at most this many. Three CTAs
/// run on an SM, but if there are so many, some large clusters find no place on a GPC and wait.
inline int most_filtering_ctas(Device device) { return 2 * num_sms(device); }

}  // namespace flashplan::cuda
