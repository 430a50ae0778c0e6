// SPDX-License-Identifier: Apache-2.0
// Tensor maps of the tensors of a run.
#pragma once

#include "abi/tensor_maps.h"
#include "flashplan/plan.h"
#include "plan/kernel/kernel.h"

namespace flashplan::cuda {

/// Encodes the maps that the tensors allow. Maps need addresses and strides of multiples of 16
/// bytes. Maps of paged k and v also need pages of a multiple of 8 keys. Maps of q and o whose
/// boxes have the rows of a tile need a tile that consists of whole groups of query heads. Takes
/// about 1 us, and never waits for the GPU.
TensorMaps encode_tensor_maps(const Kernel& kernel, const AttentionOptions& options,
                              const AttentionTensors& tensors) noexcept;

}  // namespace flashplan::cuda
