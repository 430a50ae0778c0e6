// SPDX-License-Identifier: Apache-2.0
// The arguments of append_mla() and gather_mla() on the CPU and on CUDA.
#pragma once

#include <cstdint>

#include "ops/params.h"

namespace flashplan {

/// The most latent dims of a key.
constexpr int32_t kMaxLatentDim = 4096;

/// One of the two parts of keys, the latent dims or the rotated dims: where it lies in the tensor
/// of tokens (`rows`), and where in the cache. Strides are in bytes.
struct MlaPart {
  char* rows = nullptr;
  int64_t row_stride = 0;
  char* cache = nullptr;
  int64_t page_stride = 0;
  int64_t slot_stride = 0;  // bytes from one token of a page to the next
  int32_t num_dims = 0;     // 0: there is no such part
  DType dtype = DType::kFloat32;
  DType cache_dtype = DType::kFloat32;
  bool verbatim = false;  // elements are copied without conversion

  FLASHPLAN_HOST_DEVICE char* row(int32_t token) const { return rows + token * row_stride; }
  FLASHPLAN_HOST_DEVICE char* slot(int64_t page, int32_t row_in_page) const {
    return cache + page * page_stride + row_in_page * slot_stride;
  }
};

struct MlaAppendParams {
  MlaPart parts[2];
  TokenPlaces places;                 // given by `slots`, not by lengths or positions
  RopeParams rope;                    // sides[0] is q_pe, in place; head_dim is 0: no rotation
  const void* norm_weight = nullptr;  // null: latent dims are not normalised
  DType weight_dtype = DType::kFloat32;
  float eps = 0.0F;
  float scale = 1.0F;
  bool has_scales = false;  // kFp8DsMla: scales lie behind the latent dims
  int32_t num_rows = 0;
};

struct MlaGatherParams {
  MlaPart parts[2];
  PageTable pages;
  const int32_t* indptr = nullptr;  // [batch_size + 1]
  const int32_t* starts = nullptr;  // [batch_size] first token of each request; null: 0 for all
  int32_t batch_size = 0;
  float scale = 1.0F;
  bool has_scales = false;
  int32_t num_rows = 0;  // number of rows of `out`

  /// The request of a row of `out`, which must be below indptr[batch_size].
  FLASHPLAN_HOST_DEVICE int32_t request_of(int32_t row) const {
    int32_t request = 0;
    for (int32_t behind = batch_size; behind - request > 1;) {
      const int32_t middle = request + (behind - request) / 2;
      (indptr[middle] <= row ? request : behind) = middle;
    }
    return request;
  }

  struct Place {
    int32_t page = -1;  // < 0: the page id is outside of the cache
    int32_t row_in_page = 0;
  };
  FLASHPLAN_HOST_DEVICE Place place_of(int32_t request, int32_t row) const {
    const int64_t first = starts == nullptr ? 0 : starts[request];
    const int64_t key = first + row - indptr[request];
    if (key < 0 || key > 0x7fffffff) return {};
    const int64_t column = key / pages.page_size.value;
    if (column >= pages.num_ids) return {};
    const int32_t page = pages.ids[request * pages.row_stride + column];
    if (page < 0 || page >= pages.num_pages) return {};
    return {page, static_cast<int32_t>(key - column * pages.page_size.value)};
  }
};

}  // namespace flashplan
