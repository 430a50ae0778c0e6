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

/// Merges attention states of the same queries over disjoint sets of keys, and writes the merged
/// state to `out`. It adds the states in the order of the array, in float32. `num_states` must be
/// at least 1. `out` may be one of the states, but must not overlap a state in memory in any other
/// way.
///
/// `base2` says whether the lse of all states and of `out` are logarithms to base 2. If it is
/// false, they are natural logarithms.
///
/// A row whose lse is NaN or +inf in any state becomes NaN in `out`: its lse and all its elements
/// of o. If an element of o is NaN or infinite in a state whose lse is not -inf, this element is
/// NaN or infinite in `out`.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
///   kInvalidArgument, kInvalidType  shapes, dtypes or devices differ, or `out` shares memory with
///                                   a part of an input; nothing was written
///   kUnsupported                    on CUDA: there are more than 64 states, and their strides or
///                                   their distances in memory from one to the next are not equal,
///                                   as those of slices of one tensor would be
///   kCudaError                      the launch failed
FLASHPLAN_API Status merge_states(const AttentionState* states, int32_t num_states,
                                  const AttentionState& out, Stream stream = nullptr,
                                  bool base2 = false) noexcept;

}  // namespace flashplan
