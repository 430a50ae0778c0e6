// SPDX-License-Identifier: Apache-2.0
// Tensor maps of the tensors of a run.
#pragma once

#include "abi/tensor_maps.h"
#include "flashplan/plan.h"
#include "plan/kernel/kernel.h"

namespace flashplan::cuda {

/// Encodes the maps that the tensors allow. Maps need 16-byte aligned rows and strides, the head
/// dims of the kernel, pages of a multiple of 8 keys, and groups of a power of two of query heads.
/// Takes about 1 us, and never waits for the GPU.
TensorMaps encode_tensor_maps(const Kernel& kernel, const AttentionOptions& options,
                              const AttentionTensors& tensors) noexcept;

}  // namespace flashplan::cuda
