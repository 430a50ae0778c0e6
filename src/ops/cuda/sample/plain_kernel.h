// SPDX-License-Identifier: Apache-2.0
// sample() of a row without filters, which a cluster of CTAs reads once. Each warp tells all CTAs
// what its blocks weigh. Then the threads of each CTA together find the block of the token, and the
// warp that has weighed it draws the token.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/cuda/sample/plain_row.h"
#include "ops/cuda/sample/ways.h"

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

namespace {

constexpr int kPlainCtasOfSm = 2;  // so that a block and its weights fit the registers

template <DType kDType, bool kFromProbs>
__global__ void __launch_bounds__(kRowThreads, kPlainCtasOfSm)
    plain_kernel(const __grid_constant__ SampleParams p) {
  __shared__ PlainShared shared;
  const int32_t row = row_of_cluster();
  if (is_without_row(p, row)) return;
  SamplePlain<kDType, kFromProbs>(p, row, shared).run();
}

}  // namespace

template <DType kDType>
Status sample_plain(const SampleParams& p, Device device, Stream stream) noexcept {
  const Grid grid = grid_of_rows(p, ctas_of_row(p, device), device);
  const auto kernel = p.from_probs ? plain_kernel<kDType, true> : plain_kernel<kDType, false>;
  return launch(kernel, grid, device, stream, p);
}

}  // namespace flashplan::cuda
