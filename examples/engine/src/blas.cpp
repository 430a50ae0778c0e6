// SPDX-License-Identifier: Apache-2.0
#include "products.h"

// The Fortran interface that every BLAS has. It takes matrices that are stored by columns.
extern "C" void sgemm_(const char* trans_a, const char* trans_b, const int* m, const int* n,
                       const int* k, const float* alpha, const float* a, const int* lda,
                       const float* b, const int* ldb, const float* beta, float* c, const int* ldc);

namespace engine {

void multiply_fastest(const float* x, int64_t m, int64_t k, const float* w, int64_t n, float* y,
                      int64_t y_stride) {
  // x, w and y are stored by rows. BLAS reads them by columns, so it sees their transposes, and
  // computes y^T = w x^T.
  const int rows = static_cast<int>(m), inner = static_cast<int>(k), columns = static_cast<int>(n);
  const int stride = static_cast<int>(y_stride);
  const float one = 1.0F, zero = 0.0F;
  sgemm_("T", "N", &columns, &rows, &inner, &one, w, &inner, x, &inner, &zero, y, &stride);
}

}  // namespace engine
