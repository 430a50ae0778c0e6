// SPDX-License-Identifier: Apache-2.0
#include "products.h"

#include <cstring>

namespace engine {

namespace {

constexpr int kLanes = 8;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

/// Multiplies kRows rows of x, and reads each row of w once. The terms of an element are always
/// added in the same order: within each lane, then lane after lane, then the terms that are left.
template <int kRows>
void multiply_rows(const float* x, int64_t k, const float* w, int64_t n, float* y,
                   int64_t y_stride) {
  const int64_t whole = k - k % kLanes;
  for (int64_t j = 0; j < n; ++j, w += k) {
    Lanes sums[kRows] = {};
    for (int64_t p = 0; p < whole; p += kLanes) {
      Lanes weights;
      std::memcpy(&weights, w + p, sizeof(weights));
      for (int i = 0; i < kRows; ++i) {
        Lanes values;
        std::memcpy(&values, x + i * k + p, sizeof(values));
        sums[i] += values * weights;
      }
    }
    for (int i = 0; i < kRows; ++i) {
      float sum = 0.0F;
      for (int lane = 0; lane < kLanes; ++lane) sum += sums[i][lane];
      for (int64_t p = whole; p < k; ++p) sum += x[i * k + p] * w[p];
      y[i * y_stride + j] = sum;
    }
  }
}

}  // namespace

void multiply_row_by_row(const float* x, int64_t m, int64_t k, const float* w, int64_t n, float* y,
                         int64_t y_stride) {
  constexpr int kRows = 4;
  for (; m >= kRows; m -= kRows, x += kRows * k, y += kRows * y_stride) {
    multiply_rows<kRows>(x, k, w, n, y, y_stride);
  }
  for (; m > 0; --m, x += k, y += y_stride) multiply_rows<1>(x, k, w, n, y, y_stride);
}

}  // namespace engine
