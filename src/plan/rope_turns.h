// SPDX-License-Identifier: Apache-2.0
// Computes from a Rope the angles that kernels read.
#pragma once

#include <cstdint>

#include "abi/rope_turns.h"
#include "flashplan/rope.h"
#include "flashplan/status.h"

namespace flashplan {

/// Checks the numbers of a Rope for heads of `head_dim`.
Status check_rope(const Rope& rope, int64_t head_dim) noexcept;

/// The angles of a Rope that has passed check_rope().
RopeTurns make_rope_turns(const Rope& rope, int32_t head_dim) noexcept;

}  // namespace flashplan
