// SPDX-License-Identifier: Apache-2.0
// What apply_rope() and rope_append_paged_kv() check and compute alike.
#pragma once

#include <cstdint>

#include "flashplan/rope.h"
#include "flashplan/status.h"
#include "ops/params.h"

namespace flashplan {

/// The numbers of a Rope for heads of `head_dim`.
Status check_rope(const Rope& rope, int64_t head_dim) noexcept;

/// The params of heads like those of `q` [tokens, heads, head_dim], without sides and positions.
RopeParams make_rope_params(const Rope& rope, const TensorView& q) noexcept;

/// Heads [tokens, heads, head_dim] that are read and where they are written.
RopeSide make_rope_side(const TensorView& from, const TensorView& to) noexcept;

}  // namespace flashplan
