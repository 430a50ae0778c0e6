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

/// Merges `num_states` >= 1 attention states of the same queries over disjoint sets of keys, and
/// writes the merged state to `out`. It adds the states in their order, in float32. If any state
/// has an lse of NaN or +inf for a row, then `out` has NaN as the lse and as all elements of o for
/// this row. If an element of o is NaN or infinite in a state, it is NaN or infinite in `out`, too.
/// `out` may be one of the states, but must not share memory with a state in any other way. All lse
/// are natural logarithms if `base2` is false, and logarithms to base 2 if it is true.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
///   kInvalidArgument, kInvalidType  shapes, dtypes or devices differ, or `out` shares memory with
///                                   a part of an input; nothing was written
///   kUnsupported                    on CUDA: more than 64 states, unless all have equal strides
///                                   and follow each other at equal distances in memory, as slices
///                                   of one tensor do
///   kCudaError                      the launch failed
FLASHPLAN_API Status merge_states(const AttentionState* states, int32_t num_states,
                                  const AttentionState& out, Stream stream = nullptr,
                                  bool base2 = false) noexcept;

}  // namespace flashplan
