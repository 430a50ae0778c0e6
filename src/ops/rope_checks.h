// SPDX-License-Identifier: Apache-2.0
// What apply_rope() and rope_append_paged_kv() compute alike.
#pragma once

#include <cstdint>

#include "flashplan/rope.h"
#include "flashplan/status.h"
#include "ops/params.h"
#include "plan/rope_turns.h"

namespace flashplan {

/// The params of heads like those of `q` [tokens, heads, head_dim], without sides and positions.
RopeParams make_rope_params(const Rope& rope, const TensorView& q) noexcept;

/// Heads [tokens, heads, head_dim] that are read and where they are written.
RopeSide make_rope_side(const TensorView& from, const TensorView& to) noexcept;

}  // namespace flashplan
