// SPDX-License-Identifier: Apache-2.0
// Conversion of heads to 8-bit floats.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// Where quantize_fp8() takes its scales from.
enum class ScaleSource : int32_t {
  /// The largest finite |x| divided by the largest number of the format; 1 if that is 0.
  kValues = 0,
  kNumber,  // the argument `number`
  kTensor,  // the tensor `scale`
};

/// Computes out = x / scale, in float32 and rounded to nearest even, so that x is about
/// scale * out. Numbers that are too large become the largest one of the format; NaN stays NaN.
/// x [tokens, heads, head_dim] is float32, float16 or bfloat16, with any strides; `out` has its
/// shape and is float8_e4m3fn or float8_e5m2. `scale` is float32 [1], for all heads, or [heads]:
/// read if `source` is kTensor, else written. A scale is a normal float > 0; on CUDA, those of
/// kTensor are not checked. `number` is used only if `source` is kNumber.
///
/// On CUDA: up to three launches on `stream`, no allocation, no synchronisation; may be captured in
/// a graph.
///   kInvalidArgument, kInvalidType  an argument is malformed, or an output shares memory with
///                                   another argument; nothing was written
///   kCudaError                      a launch failed
FLASHPLAN_API Status quantize_fp8(const TensorView& x, const TensorView& out,
                                  const TensorView& scale,
                                  ScaleSource source = ScaleSource::kValues, float number = 1.0F,
                                  Stream stream = nullptr) noexcept;

}  // namespace flashplan
