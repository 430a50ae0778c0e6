// SPDX-License-Identifier: Apache-2.0
// sample() with top-p or a large top-k alone: see counted.h and kept.h.
#pragma once

#include <cstdint>

#include "ops/cuda/sample/cluster_kernel.h"
#include "ops/cuda/sample/kept.h"
#include "ops/cuda/sample/ways.h"

namespace flashplan::cuda {

namespace {

/// The dynamic shared memory begins with a CountedShared of so many floats. That of a SampleRow
/// follows.
constexpr int kCounted = static_cast<int>(sizeof(CountedShared)) / 4;
constexpr int kCountedCtasOfSm = 2;  // with a third, registers would be spilled

/// The very few rows from which draw_counted() cannot draw are drawn from as with other filters.
template <DType kDType, bool kFromProbs>
__global__ void __launch_bounds__(kRowThreads, kCountedCtasOfSm)
    counted_kernel(const __grid_constant__ RowParams<SampleParams> params) {
  __shared__ SampleShared shared;
  extern __shared__ float4 memory[];
  auto* floats = reinterpret_cast<float*>(memory);
  const int32_t row = row_of_cluster();
  if (is_without_row(params.p, row)) return;
  auto& counted = *reinterpret_cast<CountedShared*>(floats);
  if (draw_counted<kDType, kFromProbs>(params.p, row, counted, shared)) return;
  __syncthreads();
  draw_from_cluster<kDType, kFromProbs>(params, shared, floats + kCounted);
}

}  // namespace

template <DType kDType>
Status sample_counted(const SampleParams& p, Device device, Stream stream) noexcept {
  const int cluster = ctas_of_row(p, device);
  const int32_t blocks = (p.vocab - 1) / sampling::kBlock + 1;
  const int32_t part = ((blocks - 1) / cluster + 1) * sampling::kBlock;
  const RowParams<SampleParams> params{p, {.part = part, .held = false}};
  const Grid grid =
      grid_of_rows(p, cluster, device, kCounted * 4 + cluster * bytes_of_rank(cluster));
  const auto kernel = p.from_probs ? counted_kernel<kDType, true> : counted_kernel<kDType, false>;
  return launch(kernel, grid, device, stream, params);
}

}  // namespace flashplan::cuda
