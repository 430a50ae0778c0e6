// SPDX-License-Identifier: Apache-2.0
// The rows of a tensor. A row is the last dimension; rows are numbered in row-major order of the
// other dimensions.
#pragma once

#include <cstdint>

#include "abi/divisor.h"
#include "abi/host_device.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// Bytes from one index of a dimension to the next. 0 for a dimension of size 1, because frameworks
/// may give it any stride, even a misaligned one.
inline int64_t stride_bytes(const TensorView& view, int dimension) {
  return view.shape[dimension] > 1 ? view.stride[dimension] * item_size(view.dtype) : 0;
}

struct Rows {
  char* data = nullptr;    // null for a tensor that was not given
  int64_t stride[3] = {};  // strides in bytes of the dimensions before the last; 0 for missing ones
  Divisor size[2];         // sizes of the dimensions that stride[1] and stride[2] belong to
};

/// The rows of a checked tensor, which has fewer than 2^31 rows and at least one element.
inline Rows make_rows(const TensorView& view) {
  Rows rows;
  if (view.empty()) return rows;
  rows.data = static_cast<char*>(view.data);
  int32_t size[3] = {1, 1, 1};
  const int32_t missing = kMaxRank - view.rank;
  for (int32_t d = 0; d < view.rank - 1; ++d) {
    size[d + missing] = static_cast<int32_t>(view.shape[d]);
    rows.stride[d + missing] = stride_bytes(view, d);
  }
  rows.size[0] = make_divisor(size[1]);
  rows.size[1] = make_divisor(size[2]);
  return rows;
}

FLASHPLAN_HOST_DEVICE char* row_at(const Rows& rows, int32_t row) {
  const uint32_t above = quotient(static_cast<uint32_t>(row), rows.size[1]);
  const uint32_t first = quotient(above, rows.size[0]);
  const int64_t third = row - static_cast<int64_t>(above) * rows.size[1].value;
  const int64_t second = static_cast<int64_t>(above) - int64_t{first} * rows.size[0].value;
  return rows.data + first * rows.stride[0] + second * rows.stride[1] + third * rows.stride[2];
}

/// The number of rows of a tensor; 1 for a vector.
inline int64_t num_rows(const TensorView& view) {
  int64_t count = 1;
  for (int32_t d = 0; d < view.rank - 1; ++d) count *= view.shape[d];
  return count;
}

}  // namespace flashplan
