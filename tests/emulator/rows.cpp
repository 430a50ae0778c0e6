// SPDX-License-Identifier: Apache-2.0
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/float_formats.h"

namespace flashplan::test {
namespace {

size_t index(int64_t i) { return static_cast<size_t>(i); }

template <DType kDType>
float narrow(float number, unsigned char* to) {
  const auto bits = cpu::Format<kDType>::store(number);
  std::memcpy(to, &bits, sizeof bits);
  return cpu::Format<kDType>::load(bits);
}

/// Writes a number, and returns what the dtype made of it.
float narrow(DType dtype, float number, unsigned char* to) {
  switch (dtype) {
    case DType::kFloat16: return narrow<DType::kFloat16>(number, to);
    case DType::kBFloat16: return narrow<DType::kBFloat16>(number, to);
    case DType::kFloat8E4M3: return narrow<DType::kFloat8E4M3>(number, to);
    case DType::kFloat8E5M2: return narrow<DType::kFloat8E5M2>(number, to);
    default: return narrow<DType::kFloat32>(number, to);
  }
}

/// Writes the bytes of a row of kFp8DsMla. Its numbers are rounded to bfloat16, to which kernels
/// widen such keys.
void narrow_ds_mla(const float* from, float* numbers, unsigned char* to) {
  constexpr int32_t kGroup = 128;
  for (int32_t i = 0; i < kDsMlaScaledDims / kGroup; ++i) {
    float largest = 0;
    for (int32_t d = 0; d < kGroup; ++d) {
      largest = std::max(largest, std::fabs(from[kGroup * i + d]));
    }
    const float scale = largest / 448.0F;
    for (int32_t d = kGroup * i; d < kGroup * (i + 1); ++d) {
      const float number = narrow(DType::kFloat8E4M3, from[d] / scale, to + d) * scale;
      unsigned char widened[2];
      numbers[d] = narrow(DType::kBFloat16, number, widened);
    }
    std::memcpy(to + kDsMlaScaledDims + 4 * i, &scale, sizeof scale);
  }
  for (int32_t d = kDsMlaScaledDims; d < kDsMlaDims; ++d) {
    numbers[d] = narrow(DType::kBFloat16, from[d], to + 528 + 2 * (d - kDsMlaScaledDims));
  }
}

}  // namespace

Rows::Rows(DType dtype, int64_t num_rows, int32_t dims, bool aligned)
    : dtype_(dtype),
      num_rows_(num_rows),
      dims_(dims),
      row_size_(dtype == DType::kFp8DsMla ? kDsMlaBytes : dims) {
  const int64_t unit = 16 / item_size(dtype);  // elements of 16 bytes
  constexpr int64_t kGap = 3;                  // which is no multiple of any unit
  stride_ = (row_size_ + unit - 1) / unit * unit + (aligned ? unit : kGap);
  offset_ = aligned ? 0 : kGap * item_size(dtype);
  numbers_.assign(index(num_rows * dims), NAN);
  memory_.assign(index(num_rows * stride_ * item_size(dtype)) + 256, 0xff);
}

unsigned char* Rows::data() const {
  const auto address = (reinterpret_cast<uintptr_t>(memory_.data()) + 127) & ~uintptr_t{127};
  return reinterpret_cast<unsigned char*>(address) + offset_;
}

void Rows::write(int64_t row, const float* numbers) {
  if (dtype_ == DType::kFp8DsMla && dims_ > 0) {
    narrow_ds_mla(numbers, &numbers_[index(row * dims_)], data() + row * stride_);
    return;
  }
  for (int32_t d = 0; d < dims_; ++d) write(row, d, numbers[d]);
}

void Rows::write(int64_t row, int32_t dim, float number) {
  unsigned char* to = data() + (row * stride_ + dim) * item_size(dtype_);
  numbers_[index(row * dims_ + dim)] = narrow(dtype_, number, to);
}

float Rows::load(int64_t row, int32_t dim) const {
  const unsigned char* from = data() + (row * stride_ + dim) * item_size(dtype_);
  if (dtype_ == DType::kFloat32) {
    float number = 0;
    std::memcpy(&number, from, sizeof number);
    return number;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, from, sizeof bits);
  return dtype_ == DType::kFloat16 ? cpu::Format<DType::kFloat16>::load(bits)
                                   : cpu::Format<DType::kBFloat16>::load(bits);
}

bool Rows::has_untouched_gaps() const {
  const int64_t size = item_size(dtype_);
  for (int64_t row = 0; row < num_rows_; ++row) {
    const unsigned char* gap = data() + (row * stride_ + row_size_) * size;
    const int64_t bytes = (stride_ - row_size_) * size;
    if (!std::all_of(gap, gap + bytes, [](unsigned char byte) { return byte == 0xff; })) {
      return false;
    }
  }
  return true;
}

TensorView Rows::view(std::initializer_list<int64_t> shape) const {
  TensorView view = contiguous(data(), dtype_, {}, shape);
  for (int32_t d = 0; d < view.rank; ++d) view.stride[d] *= stride_;
  view.shape[view.rank] = row_size_;
  view.stride[view.rank++] = 1;
  return view;
}

}  // namespace flashplan::test
