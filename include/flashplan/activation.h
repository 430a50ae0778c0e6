// SPDX-License-Identifier: Apache-2.0
// The activations of gated feed-forward layers.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

enum class Activation : int32_t {
  kSilu = 0,  // x / (1 + exp(-x))
  kGelu,      // x / 2 * (1 + erf(x / sqrt(2)))
  kGeluTanh,  // x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
};

/// Computes out = activation(x[..., :d]) * x[..., d:] / scale in float32. x [..., 2 d] of rank 1
/// to 4 is float32, float16 or bfloat16; its rows may have any strides. out [..., d] has x's dtype,
/// or an 8-bit float dtype, in which results saturate. `scale` is a normal float32 > 0. `pdl` asks
/// for programmatic dependent launch; AttentionTensors::pdl says what that is.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
///   kInvalidArgument, kInvalidType  a tensor is malformed, or `out` shares memory with x; nothing
///                                   was written
///   kCudaError                      the launch failed
FLASHPLAN_API Status gated_activation(Activation activation, const TensorView& x,
                                      const TensorView& out, float scale = 1.0F,
                                      Stream stream = nullptr, bool pdl = false) noexcept;

}  // namespace flashplan
