// SPDX-License-Identifier: Apache-2.0
// sample() of rows without filters, each of which a cluster of CTAs reads once: see plain_row.h.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/plain_row.h"
#include "ops/cuda/sample/ways.h"

namespace flashplan::cuda {
namespace {

constexpr int kPlainCtasOfSm = 2;  // so that registers hold a block and its weights

template <DType kDType, bool kFromProbs>
__global__ void __launch_bounds__(kRowThreads, kPlainCtasOfSm)
    plain_kernel(const __grid_constant__ SampleParams p) {
  __shared__ PlainShared shared;
  const int32_t row = row_of_cluster();
  if (is_without_row(p, row)) return;
  PlainRow<kDType, kFromProbs>(p, row, shared).run();
}

}  // namespace

template <DType kDType>
Status sample_plain(const SampleParams& p, Device device, Stream stream) noexcept {
  const Grid grid = grid_of_rows(p, ctas_of_row(p, device), device);
  const auto kernel = p.from_probs ? plain_kernel<kDType, true> : plain_kernel<kDType, false>;
  return launch(kernel, grid, device, stream, p);
}

}  // namespace flashplan::cuda
