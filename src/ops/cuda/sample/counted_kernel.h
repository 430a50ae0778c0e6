// SPDX-License-Identifier: Apache-2.0
// sample() with top-p or a large top-k alone: see counted.h and kept.h.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/kept.h"
#include "ops/cuda/sample/ways.h"

namespace flashplan::cuda {

namespace {

constexpr int kCountedCtasOfSm = 2;  // with a third, registers would be spilled

template <DType kDType, bool kFromProbs>
__global__ void __launch_bounds__(kRowThreads, kCountedCtasOfSm)
    counted_kernel(const __grid_constant__ SampleParams p) {
  __shared__ SampleShared shared;
  extern __shared__ float4 memory[];
  const int32_t row = row_of_cluster();
  if (is_without_row(p, row)) return;
  draw_counted<kDType, kFromProbs>(p, row, *reinterpret_cast<CountedShared*>(memory), shared);
}

}  // namespace

template <DType kDType>
Status sample_counted(const SampleParams& p, Device device, Stream stream) noexcept {
  const Grid grid =
      grid_of_rows(p, ctas_of_row(p, device), device, static_cast<int>(sizeof(CountedShared)));
  const auto kernel = p.from_probs ? counted_kernel<kDType, true> : counted_kernel<kDType, false>;
  return launch(kernel, grid, device, stream, p);
}

}  // namespace flashplan::cuda
