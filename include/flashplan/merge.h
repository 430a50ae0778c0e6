// SPDX-License-Identifier: Apache-2.0
// Merging attention states: the operator (+) of FlashInfer, section 2.2.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// One attention state: outputs over a set of keys and the log-sum-exp of their logits.
struct AttentionState {
  TensorView o;  // [num_tokens, num_heads, head_dim], float32, float16 or bfloat16
  /// [num_tokens, num_heads] float32; -inf: no keys, and o is ignored.
  TensorView lse;
};

/// Merges `num_states` >= 1 states over disjoint keys into `out`, left to right in float32. If the
/// lse of a row is NaN or +inf in any state, the lse and all of o of this row become NaN in `out`.
/// NaN or infinity in o makes the same dim of `out` NaN or infinite. `out` may be one of the
/// states, but must not overlap a state in any other way. If `base2` is false, the lse of the
/// states and of `out` are natural logarithms; if it is true, they are logarithms to base 2.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
///   kInvalidArgument, kInvalidType  shapes, dtypes or devices differ, or `out` shares memory with
///                                   a part of an input; nothing was written
///   kUnsupported                    on CUDA: there are more than 64 states, and they are not
///                                   slices of one tensor (equal strides, and the same distance in
///                                   memory from each state to the next)
///   kCudaError                      the launch failed
FLASHPLAN_API Status merge_states(const AttentionState* states, int32_t num_states,
                                  const AttentionState& out, Stream stream = nullptr,
                                  bool base2 = false) noexcept;

}  // namespace flashplan
