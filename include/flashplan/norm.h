// SPDX-License-Identifier: Apache-2.0
// Normalisation of rows.
#pragma once

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

// In all functions below, x [..., n] of rank 1 to 4 is float32, float16 or bfloat16. Its rows may
// have any strides. weight [n] has x's dtype or is float32; if it is empty, rows are normalised and
// not multiplied by a weight. `out` is shaped like x, and has its dtype or is float8_e4m3fn or
// float8_e5m2; if it has x's dtype, it may be x itself. Sums and products are in float32, and the
// result is rounded once; in 8-bit formats, values that are too large become the largest finite
// one. On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a
// graph.
//   kInvalidArgument, kInvalidType  a tensor is malformed, or an output shares memory with another
//                                   argument; nothing was written
//   kCudaError                      the launch failed

/// A norm divides its results by scale * scales[0].
struct OutScale {
  float scale = 1.0F;  // a normal float > 0
  TensorView scales;   // [1] float32, on x's device, or empty: 1. Not checked on a GPU
};

struct RmsNormOptions {
  float eps = 1e-6F;   // added to the mean of the squares; >= 0
  bool gemma = false;  // multiplies by 1 + weight instead of weight, if there is one
  OutScale out_scale = {};
  bool pdl = false;  // programmatic dependent launch, see AttentionTensors
};

/// Computes out = x / sqrt(mean(x^2) + eps) * weight.
FLASHPLAN_API Status rmsnorm(const TensorView& x, const TensorView& weight, const TensorView& out,
                             const RmsNormOptions& options = {}, Stream stream = nullptr) noexcept;

/// Adds x to residual, rounds the sum to their dtype, and then writes rmsnorm(residual) to x. Both
/// tensors have the same shape and dtype.
FLASHPLAN_API Status add_rmsnorm(const TensorView& x, const TensorView& residual,
                                 const TensorView& weight, const RmsNormOptions& options = {},
                                 Stream stream = nullptr) noexcept;

/// Adds x to residual, rounds the sum to their dtype, and then writes rmsnorm(residual) to `out`. x
/// stays unchanged, unless `out` is the same tensor.
FLASHPLAN_API Status add_rmsnorm(const TensorView& x, const TensorView& residual,
                                 const TensorView& weight, const TensorView& out,
                                 const RmsNormOptions& options, Stream stream) noexcept;

struct LayerNormOptions {
  float eps = 1e-5F;  // added to the variance; >= 0
  OutScale out_scale = {};
};

/// Computes out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. bias [n] may be
/// empty; it has the dtype of weight or, if weight is empty, that of x.
FLASHPLAN_API Status layernorm(const TensorView& x, const TensorView& weight,
                               const TensorView& bias, const TensorView& out,
                               const LayerNormOptions& options = {},
                               Stream stream = nullptr) noexcept;

}  // namespace flashplan
