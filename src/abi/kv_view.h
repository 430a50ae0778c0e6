// SPDX-License-Identifier: Apache-2.0
// Where keys and values lie: the one sparse format of the library. Strides are in elements.
#pragma once

#include <cstdint>

#include "abi/divisor.h"

namespace flashplan {

/// K or V, ragged or paged. The row of a key lies at
///   data + page * page_stride + row_in_page * token_stride + kv_head * head_stride
/// A ragged tensor is one page; its row_in_page is the key's row of the tensor.
struct KvView {
  const void* data = nullptr;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

/// Page ids of a request: ids + (indptr ? indptr[request] : request * row_stride).
struct PageTable {
  const int32_t* ids = nullptr;     // null: ragged
  const int32_t* indptr = nullptr;  // [batch_size + 1], or null for a block table
  int64_t row_stride = 0;
  Divisor page_size = {};
  int32_t num_pages = 1;  // of the cache, whose ids are [0, num_pages); 1: ragged
};

}  // namespace flashplan
