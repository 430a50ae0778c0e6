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

/// Merges `num_states` >= 1 states over disjoint keys into `out`, left to right in float32. An lse
/// of NaN or +inf makes the lse and all of o of that row NaN. NaN or infinity in o makes that dim
/// of the result NaN or infinite. `out` may be one of the inputs, but must not overlap an input
/// otherwise. Every lse, also that of `out`, is a natural logarithm, or with `base2` a logarithm to
/// base 2.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
///   kInvalidArgument, kInvalidType  shapes, dtypes or devices differ, or `out` shares memory with
///                                   a part of an input; nothing was written
///   kUnsupported                    on CUDA: more than 64 states that are not evenly spaced in
///                                   memory
///   kCudaError                      the launch failed
FLASHPLAN_API Status merge_states(const AttentionState* states, int32_t num_states,
                                  const AttentionState& out, Stream stream = nullptr,
                                  bool base2 = false) noexcept;

}  // namespace flashplan
