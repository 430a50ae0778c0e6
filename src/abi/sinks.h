// SPDX-License-Identifier: Apache-2.0
// Attention sinks that a kernel reads.
#pragma once

namespace flashplan {

/// One logit for each query head, which counts in the softmax but has no value vector. The logits
/// are float32 or bfloat16, in memory of the device that runs the kernel.
struct Sinks {
  const void* data = nullptr;  // [num_qo_heads]; null: none
  bool are_bfloat16 = false;
};

}  // namespace flashplan
