// SPDX-License-Identifier: Apache-2.0
// The dynamic shared memory of a CTA, which the kernels of src/ops/cuda declare as `memory`.
#pragma once

#include "cuda_builtins.h"
#include "simt.h"

namespace flashplan::cuda {
namespace {
thread_local float4 memory[simt::kDynamicBytes / sizeof(float4)];
}
}  // namespace flashplan::cuda
