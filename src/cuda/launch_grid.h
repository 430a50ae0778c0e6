// SPDX-License-Identifier: Apache-2.0
// The launch of every kernel: of attention, of users' variants, of the operators.
#pragma once

#include <cuda_runtime_api.h>

#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan::cuda {

struct Grid {
  dim3 ctas;
  dim3 threads;        // of a CTA
  int cluster = 1;     // CTAs along x that share their memory; divides ctas.x
  int smem_bytes = 0;  // dynamic
  bool pdl = false;    // may start before the stream's previous kernel ends; from sm_90 on
};

/// Launches `kernel` on `stream` of the current device. `params` is its only argument, which is
/// copied. Neither allocates nor synchronises.
Status launch_grid(cudaKernel_t kernel, const Grid& grid, Stream stream, void* params) noexcept;

}  // namespace flashplan::cuda
