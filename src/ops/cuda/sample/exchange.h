// SPDX-License-Identifier: Apache-2.0
// How the CTAs of a cluster tell each other values, step by step.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/mailbox.h"
#include "ops/cuda/sample/row_bins.h"

namespace flashplan::cuda {

/// In a step each CTA of the cluster sends values to all CTAs, itself among them, and waits until
/// what all CTAs have sent has come. Steps use two mailboxes and two arrays of values in turn. A
/// CTA reads what came in a step before it sends in the next one, and no CTA ends a step before all
/// have sent. So an array has been read when it is written again two steps later.
template <int kValues>
class Exchange {
 public:
  /// `values`: [2][CTAs of the cluster][kValues], at the same place in the shared memory of all
  /// CTAs and aligned to 16 bytes.
  __device__ Exchange(Mailbox (&mail)[2], uint64_t* values) : mail_(mail), values_(values) {}

  /// Sends values to all CTAs. Warp 0 calls it after a barrier of the CTA; then all threads call
  /// receive().
  __device__ void publish(const uint64_t (&values)[kValues]) {
    expect(sizeof(values));
    const int rank = lane_of_thread();
    if (rank >= cluster_size()) return;
    uint64_t* to = own_values();
    for (int v = 0; v < kValues; v += 2) mail().send(to + v, values[v], values[v + 1], rank);
  }

  __device__ Mailbox& mail() { return mail_[step_ % 2]; }
  /// Says that each CTA of the cluster sends `bytes` to this one in this step. Warp 0 calls it.
  __device__ void expect(int bytes) {
    if (threadIdx.x == 0) mail().expect(static_cast<uint32_t>(bytes * cluster_size()));
  }
  /// Waits until what all CTAs send to this one in this step has come, and ends the step.
  __device__ void receive() {
    mail().wait(step_ / 2 % 2);
    ++step_;
  }

  /// Value `v` that a CTA sent in the last step.
  __device__ uint64_t value_of(int rank, int v) const { return values_of(step_ - 1, rank)[v]; }
  /// Value `v` of the CTA whose rank is this lane's number; 0 if there is no such CTA.
  __device__ uint64_t value_of_rank(int v) const {
    const int lane = lane_of_thread();
    return lane < cluster_size() ? value_of(lane, v) : 0;
  }
  /// Where the values go that this CTA sends in this step: at the same place in each CTA.
  __device__ uint64_t* own_values() const { return values_of(step_, cluster_rank()); }
  /// The end of `values`, behind both of its arrays.
  __device__ uint64_t* end() const { return values_of(1, cluster_size()); }

 private:
  __device__ uint64_t* values_of(unsigned step, int rank) const {
    return values_ + (static_cast<int>(step % 2) * cluster_size() + rank) * kValues;
  }

  Mailbox (&mail_)[2];
  uint64_t* values_;
  unsigned step_ = 0;
};

}  // namespace flashplan::cuda
