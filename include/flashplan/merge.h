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

/// Merges attention states of the same queries into one state, which it writes to `out`. Each state
/// is the attention over a set of keys; the sets must be disjoint. The states are added in float32,
/// in their order in the array `states`, which must have at least one. `out` may be one of the
/// states; apart from that, it must share no memory with any state.
///
/// `base2`: the lse of the states and of `out` are logarithms to base 2. If it is false, they are
/// natural logarithms.
///
/// If the lse of a row is NaN or +inf in any state, the row of `out` has NaN as its lse and in all
/// elements of o. If an element of o is NaN or infinite in any state, this element of `out` is NaN
/// or infinite, too; but a state's o is ignored in rows whose lse is -inf.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
///   kInvalidArgument, kInvalidType  shapes, dtypes or devices differ, or `out` shares memory with
///                                   a part of an input; nothing was written
///   kUnsupported                    on CUDA: there are more than 64 states, and these do not have
///                                   equal strides and equal distances in memory from one to the
///                                   next, as slices of one tensor have
///   kCudaError                      the launch failed
FLASHPLAN_API Status merge_states(const AttentionState* states, int32_t num_states,
                                  const AttentionState& out, Stream stream = nullptr,
                                  bool base2 = false) noexcept;

}  // namespace flashplan
