// SPDX-License-Identifier: Apache-2.0
// Divides a GPU between two kernels of a plan that run one batch at the same time: one for requests
// of many rows, which are bound by arithmetic, one for requests of few, which are bound by memory.
#pragma once

#include <cstdint>

#include "flashplan/plan.h"

namespace flashplan {

/// The number of SMs that the kernel for many rows gets, such that both kernels end at about the
/// same time. The kernel for few rows gets the other SMs; each kernel gets at least one. `tile_q`:
/// packed query rows of a row tile of the kernel for many rows. `num_processors`: SMs of the GPU,
/// at least 2. The batch must have requests of both kinds, and checked lengths.
int32_t processors_for_many_rows(const Batch& batch, const AttentionOptions& options,
                                 int32_t tile_q, int32_t num_processors) noexcept;

}  // namespace flashplan
