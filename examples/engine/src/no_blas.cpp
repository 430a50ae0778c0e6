// SPDX-License-Identifier: Apache-2.0
#include "products.h"

namespace engine {

void multiply_fastest(const float* x, int64_t m, int64_t k, const float* w, int64_t n, float* y,
                      int64_t y_stride) {
  multiply_row_by_row(x, m, k, w, n, y, y_stride);
}

}  // namespace engine
