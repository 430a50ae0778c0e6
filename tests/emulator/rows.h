// SPDX-License-Identifier: Apache-2.0
// Tensors of emulated kernels. Memory that nobody has written is NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "flashplan/tensor.h"

namespace flashplan::test {

/// Rows of numbers in a dtype, with gaps between them.
class Rows {
 public:
  Rows() = default;
  Rows(DType dtype, int64_t num_rows, int32_t dims, bool aligned);

  /// Writes a row of `dims` numbers, which become what the dtype makes of them.
  void write(int64_t row, const float* numbers);
  /// Writes one number, of any dtype but kFp8DsMla.
  void write(int64_t row, int32_t dim, float number);
  /// The numbers of a row that were written here.
  const float* numbers(int64_t row) const { return &numbers_[static_cast<size_t>(row * dims_)]; }
  /// A float of 16 or 32 bits that is in memory now.
  float load(int64_t row, int32_t dim) const;

  void poison() { memory_.assign(memory_.size(), 0xff); }
  bool has_untouched_gaps() const;
  unsigned char* data() const;
  int64_t stride() const { return stride_; }
  int32_t dims() const { return dims_; }
  /// [first dimensions..., dims], where the last of `shape` counts rows that lie side by side.
  TensorView view(std::initializer_list<int64_t> shape) const;

 private:
  DType dtype_ = DType::kFloat32;
  int64_t num_rows_ = 0;
  int32_t dims_ = 0;
  int64_t row_size_ = 0;  // in elements, and so is the stride
  int64_t stride_ = 0;
  int64_t offset_ = 0;  // in bytes, of the first row from a multiple of 128
  std::vector<float> numbers_;
  std::vector<unsigned char> memory_;
};

}  // namespace flashplan::test
