// SPDX-License-Identifier: Apache-2.0
// Products of rows with a matrix of weights, float32.
#pragma once

#include <cstdint>

namespace engine {

/// y[i][j] = x[i] . w[j] for x [m, k] and w [n, k] without gaps. Rows of y are y_stride apart.
using Multiply = void (*)(const float* x, int64_t m, int64_t k, const float* w, int64_t n, float* y,
                          int64_t y_stride);

/// Multiplies so that the bits of a row of y do not depend on the other rows or on their number.
void multiply_row_by_row(const float* x, int64_t m, int64_t k, const float* w, int64_t n, float* y,
                         int64_t y_stride);

/// Multiplies by the BLAS if the engine was built with one, else row by row.
void multiply_fastest(const float* x, int64_t m, int64_t k, const float* w, int64_t n, float* y,
                      int64_t y_stride);

}  // namespace engine
