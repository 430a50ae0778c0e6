// SPDX-License-Identifier: Apache-2.0
// How a GPU is divided between the two kernels of a plan that run one batch at the same time: the
// requests of many rows, which are bound by arithmetic, and those of few, which are bound by
// memory.
#pragma once

#include <cstdint>

#include "flashplan/plan.h"

namespace flashplan {

/// The number of processors that the kernel for many rows gets, such that both kernels end at about
/// the same time; the others are for the kernel for few rows. Each gets one processor at least.
/// `tile_q`: packed query rows of a row tile of the kernel for many rows; `num_processors`: of the
/// GPU, at least 2. The batch has requests of both kinds; its lengths have been checked.
int32_t processors_for_many_rows(const Batch& batch, const AttentionOptions& options,
                                 int32_t tile_q, int32_t num_processors) noexcept;

}  // namespace flashplan
