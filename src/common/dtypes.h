// SPDX-License-Identifier: Apache-2.0
// Kinds of dtypes. Each function is a switch over all of DType, so that a new dtype is a compile
// error until every function names it.
#pragma once

#include "flashplan/tensor.h"

namespace flashplan {

/// Whether kernels compute with values of this dtype.
constexpr bool is_wide_float(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16: return true;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt32:
    case DType::kFp8DsMla: break;
  }
  return false;
}

/// Whether values of this dtype are only stored in tensors and caches. Kernels convert them to
/// wider floats before they compute with them.
constexpr bool is_narrow_float(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return true;
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt32:
    case DType::kFp8DsMla: break;
  }
  return false;
}

constexpr bool is_float(DType dtype) noexcept {
  return is_wide_float(dtype) || is_narrow_float(dtype);
}

}  // namespace flashplan
