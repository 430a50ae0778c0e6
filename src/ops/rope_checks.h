// SPDX-License-Identifier: Apache-2.0
// What apply_rope() and the operators that append rotated keys have in common.
#pragma once

#include <cstdint>

#include "flashplan/rope.h"
#include "flashplan/status.h"
#include "ops/params.h"
#include "plan/rope_turns.h"

namespace flashplan {

/// The parameters that rotate heads of the shape and dtype of `q` [tokens, heads, head_dim]. Sides
/// and positions are not set.
RopeParams make_rope_params(const Rope& rope, const TensorView& q) noexcept;

/// Describes heads [tokens, heads, head_dim] that are read from one tensor and written to another.
RopeSide make_rope_side(const TensorView& from, const TensorView& to) noexcept;

/// Checks that int64 positions in host memory are in [-2^40, 2^40]. There an angle in double
/// precision is accurate to 1e-4 radians; at 2^53 no bits are left for a fraction of a turn.
Status check_positions(const TensorView& positions) noexcept;

}  // namespace flashplan
