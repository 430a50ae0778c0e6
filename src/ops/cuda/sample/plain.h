// SPDX-License-Identifier: Apache-2.0
// sample() of a row without filters, which a cluster of CTAs reads once. Each warp tells all CTAs
// what its blocks weigh. Then the threads of each CTA together find the block of the token, and the
// warp that has weighed it draws the token.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/plain_row.h"

namespace flashplan::cuda {

/// Also takes the largest of logits, if the temperature is 0. Probabilities need another one.
template <DType kDType, bool kFromProbs>
class SamplePlain : PlainRow<kDType, kFromProbs> {
  using Base = PlainRow<kDType, kFromProbs>;

 public:
  __device__ SamplePlain(const SampleParams& p, int32_t row, PlainShared& shared)
      : Base(p, row, shared) {}

  /// Draws and writes the token, or the error of the parameters or the row.
  __device__ void run() {
    if (threadIdx.x == 0) this->init_mail();
    cluster_arrive_relaxed();
    this->start_reading();
    cluster_wait();  // all CTAs have begun: their shared memory can be written to
    this->read(typename Base::SeeNothing{}, [](int /*block*/, const WeighedBlock&) {});
    // While the entries of other CTAs are on their way.
    const auto random = sampling::random_of_try(p_, row_, 0);
    SampleError error = this->receive_entries();
    if (error == SampleError::kNone) {
      this->weigh_entries();
      error = this->draw_without_filters(random);
    }
    if (error != SampleError::kNone && is_first_thread_of_cluster()) {
      write_result(p_, row_, -1, NAN, error);
    }
  }

 private:
  using Base::p_;
  using Base::row_;
};

}  // namespace flashplan::cuda
