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
    this->read([](const float (&)[kVec]) {}, [](int /*block*/, float /*largest*/) {});
    // While the entries of other CTAs are on their way.
    const auto random = sampling::random_of_try(p_, row_, 0);
    SampleError error = this->receive_entries();
    if (error == SampleError::kNone) error = draw(random);
    if (error != SampleError::kNone && is_first_thread_of_cluster()) {
      write_result(p_, row_, -1, NAN, error);
    }
  }

 private:
  using Base::is_greedy_;
  using Base::kVec;
  using Base::p_;
  using Base::plain_;
  using Base::row_;
  using Base::total_;

  /// Chooses a block, and if this warp has weighed it, draws and writes the token.
  __device__ SampleError draw(const sampling::RandomPair& random) {
    this->weigh_entries();
    if (kFromProbs && !sampling::masses_sum_to_one(total_)) return SampleError::kProbabilities;
    this->choose(0, random);
    __syncthreads();
    const ChosenBlock& chosen = plain_.chosen[0];
    if (!this->is_of_warp(chosen.block)) return SampleError::kNone;
    this->draw_from(chosen, [&](int32_t id, uint32_t weight, const WeighedBlock& block) {
      if (is_greedy_) {
        write_result(p_, row_, id, 0.0F, SampleError::kNone);
      } else {
        write_token_of_block(p_, row_, id, weight, block.sum, chosen.mass, total_);
      }
    });
    return SampleError::kNone;
  }
};

/// In a kernel that also draws from rows with filters: a function of its own, so that the registers
/// it needs do not make the rest of the kernel spill others.
template <DType kDType>
__device__ __noinline__ void draw_plain(const SampleParams& p, int32_t row, PlainShared& shared) {
  SamplePlain<kDType, false>(p, row, shared).run();
}

}  // namespace flashplan::cuda
