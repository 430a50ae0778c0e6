// SPDX-License-Identifier: Apache-2.0
// What the operators that work on rows are told, the same on the CPU and on CUDA.
#pragma once

#include <cstdint>

#include "flashplan/activation.h"
#include "flashplan/tensor.h"
#include "ops/rows.h"

namespace flashplan {

/// rmsnorm, add_rmsnorm, layernorm.
struct NormParams {
  Rows x;
  Rows residual;                  // given: x is added to it, and the sum is what is normalised
  Rows out;                       // may be x
  const void* weight = nullptr;   // [row_size]
  const void* bias = nullptr;     // [row_size], or null
  DType dtype = DType::kFloat32;  // of all tensors
  int32_t num_rows = 0;
  int32_t row_size = 0;
  float eps = 0.0F;
  float weight_offset = 0.0F;  // added to each weight
  bool centered = false;       // layernorm: the mean is subtracted
};

/// out = activation(x[:row_size]) * x[row_size:] / scale.
struct ActivationParams {
  Rows x;  // rows of 2 * row_size
  Rows out;
  Activation activation = Activation::kSilu;
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  int32_t num_rows = 0;
  int32_t row_size = 0;
  float scale = 1.0F;
};

}  // namespace flashplan
