// SPDX-License-Identifier: Apache-2.0
// Tensors of any dtype in host memory, and the float formats written out in double arithmetic,
// independent of the library's conversions.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "flashplan/tensor.h"
#include "random_batch.h"

namespace flashplan::test {

struct FloatFormat {
  int exponent_bits;
  int mantissa_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int smallest_exponent() const { return 1 - bias(); }
};

inline FloatFormat float_format(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return {5, 10};
    case DType::kBFloat16: return {8, 7};
    case DType::kFloat8E4M3: return {4, 3};
    case DType::kFloat8E5M2: return {5, 2};
    default: return {8, 23};
  }
}

inline double decode(uint32_t bits, DType dtype) {
  const FloatFormat f = float_format(dtype);
  const uint32_t mantissa = bits & ((1U << f.mantissa_bits) - 1);
  const uint32_t exponent = (bits >> f.mantissa_bits) & ((1U << f.exponent_bits) - 1);
  const double sign = (bits >> (f.mantissa_bits + f.exponent_bits)) != 0 ? -1.0 : 1.0;
  const bool all_ones = exponent == (1U << f.exponent_bits) - 1;
  if (dtype == DType::kFloat8E4M3 ? all_ones && mantissa == 7 : all_ones) {
    const bool infinite = dtype != DType::kFloat8E4M3 && mantissa == 0;
    return infinite ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  const int shift = f.smallest_exponent() - f.mantissa_bits;
  if (exponent == 0) return sign * std::ldexp(mantissa, shift);
  return sign *
         std::ldexp(mantissa + (1U << f.mantissa_bits), shift + static_cast<int>(exponent) - 1);
}

/// To nearest even; `value` must be within the format's finite range, or an infinity that it has.
inline uint32_t encode(double value, DType dtype) {
  const FloatFormat f = float_format(dtype);
  const uint32_t sign = std::signbit(value) ? 1U << (f.mantissa_bits + f.exponent_bits) : 0;
  if (value == 0.0) return sign;
  if (std::isinf(value)) return sign | (((1U << f.exponent_bits) - 1) << f.mantissa_bits);
  const int exponent = std::max(std::ilogb(value), f.smallest_exponent());
  const double mantissa = std::nearbyint(std::ldexp(std::fabs(value), f.mantissa_bits - exponent));
  // A normal mantissa has its leading one, which adds 1 to the exponent field, and so does a
  // mantissa that was rounded up to the next power of two.
  const auto field = static_cast<uint32_t>(exponent - f.smallest_exponent());
  return sign | ((field << f.mantissa_bits) + static_cast<uint32_t>(mantissa));
}

/// Half a unit in the last place of 1.0.
inline double rounding_error(DType dtype) {
  return std::ldexp(1.0, -1 - float_format(dtype).mantissa_bits);
}

using Index = std::array<int64_t, kMaxRank>;

/// Owns its memory, which starts as NaN in every float format. Rows (the last dimension) lie
/// `pad` elements apart, so that strides are not those of a contiguous tensor.
class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(DType dtype, std::vector<int64_t> shape, int64_t pad = 0) {
    view_.dtype = dtype;
    view_.rank = static_cast<int32_t>(shape.size());
    int64_t elements = 1;
    for (int32_t d = view_.rank - 1; d >= 0; --d) {
      view_.shape[d] = shape[static_cast<size_t>(d)];
      view_.stride[d] = elements;
      elements *= view_.shape[d];
      if (d == view_.rank - 1 && view_.rank > 1) elements += pad;
    }
    bytes_.assign(static_cast<size_t>(elements * item_size(dtype)), std::byte{0xff});
  }

  TensorView view() const {
    TensorView view = view_;
    view.data = const_cast<std::byte*>(bytes_.data());
    return view;
  }
  DType dtype() const { return view_.dtype; }
  int64_t size(int32_t dim) const { return view_.shape[dim]; }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  void poison() { bytes_.assign(bytes_.size(), std::byte{0xff}); }

  /// Trailing dimensions may be left out of an index: get({row, head}).
  uint32_t bits(const Index& index) const {
    uint32_t bits = 0;
    const auto size = std::min(static_cast<size_t>(item_size(view_.dtype)), sizeof bits);
    std::memcpy(&bits, bytes_.data() + offset(index), size);
    return bits;
  }
  double get(const Index& index) const { return decode(bits(index), view_.dtype); }
  void set_bits(const Index& index, uint32_t bits) {
    std::memcpy(bytes_.data() + offset(index), &bits, static_cast<size_t>(item_size(view_.dtype)));
  }
  void set(const Index& index, double value) { set_bits(index, encode(value, view_.dtype)); }

 private:
  size_t offset(const Index& index) const {
    int64_t offset = 0;
    for (size_t d = 0; d < index.size(); ++d) offset += index[d] * view_.stride[d];
    return static_cast<size_t>(offset * item_size(view_.dtype));
  }

  std::vector<std::byte> bytes_;
  TensorView view_;
};

inline HostTensor int_tensor(const std::vector<int32_t>& values) {
  HostTensor tensor(DType::kInt32, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) {
    tensor.set_bits({static_cast<int64_t>(i)}, static_cast<uint32_t>(values[i]));
  }
  return tensor;
}

/// Small enough that no softmax of random data comes near an overflow.
inline double random_element(Random& random) { return 4 * random.unit() - 2; }

inline void fill_random(Random& random, HostTensor& tensor, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < tensor.size(1); ++h) {
      for (int64_t d = 0; d < tensor.size(2); ++d) tensor.set({r, h, d}, random_element(random));
    }
  }
}

}  // namespace flashplan::test
