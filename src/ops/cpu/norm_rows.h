// SPDX-License-Identifier: Apache-2.0
// Included by kernels.cpp only, inside the namespace of its instruction set.

/// The row that is to be normalised: `x`, or the residual after x was added to it.
template <typename Format>
const typename Format::Storage* summed_row(const NormParams& p, int32_t row) {
  using Storage = typename Format::Storage;
  const auto* x = reinterpret_cast<const Storage*>(row_at(p.x, row));
  if (p.residual.data == nullptr) return x;
  auto* residual = reinterpret_cast<Storage*>(row_at(p.residual, row));
#pragma omp simd
  for (int32_t i = 0; i < p.row_size; ++i) {
    residual[i] = Format::store(Format::load(residual[i]) + Format::load(x[i]));
  }
  return residual;
}

template <typename Format>
void norm_row(const NormParams& p, int32_t row) {
  using Storage = typename Format::Storage;
  const Storage* from = summed_row<Format>(p, row);
  auto* to = reinterpret_cast<Storage*>(row_at(p.out, row));
  const auto* weight = static_cast<const Storage*>(p.weight);
  const auto* bias = static_cast<const Storage*>(p.bias);
  const auto size = static_cast<float>(p.row_size);
  float mean = 0.0F;
  if (p.centered) {
    float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
    for (int32_t i = 0; i < p.row_size; ++i) sum += Format::load(from[i]);
    mean = sum / size;
  }
  float squares = 0.0F;
#pragma omp simd reduction(+ : squares)
  for (int32_t i = 0; i < p.row_size; ++i) {
    const float x = Format::load(from[i]) - mean;
    squares += x * x;
  }
  const float factor = 1.0F / __builtin_sqrtf(squares / size + p.eps);
  const float offset = p.weight_offset;
  if (bias == nullptr) {
#pragma omp simd
    for (int32_t i = 0; i < p.row_size; ++i) {
      const float x = (Format::load(from[i]) - mean) * factor;
      to[i] = Format::store(x * (Format::load(weight[i]) + offset));
    }
  } else {
#pragma omp simd
    for (int32_t i = 0; i < p.row_size; ++i) {
      const float x = (Format::load(from[i]) - mean) * factor;
      to[i] = Format::store(x * (Format::load(weight[i]) + offset) + Format::load(bias[i]));
    }
  }
}

void norm_rows(const NormParams& p, int32_t begin, int32_t end) noexcept {
  dispatch_wide_format(p.dtype, [&](auto format) {
    for (int32_t row = begin; row < end; ++row) norm_row<decltype(format)>(p, row);
  });
}
