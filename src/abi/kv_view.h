// SPDX-License-Identifier: Apache-2.0
// Where keys and values lie. All kernels take ragged and paged keys and values in this form.
// Strides are in elements.
#pragma once

#include <cstdint>

#include "abi/divisor.h"
#include "abi/host_device.h"

namespace flashplan {

/// K or V, ragged or paged. The row of a key, or of its value, lies at
///   data + page * page_stride + row_in_page * token_stride + kv_head * head_stride
/// A ragged tensor is one page: page is 0, and row_in_page counts from the tensor's first row.
struct KvView {
  const void* data = nullptr;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

/// The last dims of keys, if they lie in a tensor of their own and not in the rows of K. All kv
/// heads have the same last dims.
struct KeyTail {
  KvView view = {};
  int32_t num_dims = 0;  // 0: the rows of K have all dims of the keys
};

/// Lists of the keys that each query sees, which take the place of page tables. An entry is
/// page * page_size + row in page; -1 names no key.
struct KeyLists {
  const int32_t* slots = nullptr;  // [tokens, size]; null: there are no lists
  int64_t row_stride = 0;
  int32_t size = 0;
};

/// Page ids of requests: a block table, with a row for each request, or CSR.
struct PageTable {
  const int32_t* ids = nullptr;     // null: ragged
  const int32_t* indptr = nullptr;  // [batch_size + 1], or null for a block table
  int64_t row_stride = 0;
  Divisor page_size = {};
  int32_t num_pages = 1;  // pages of the cache, whose ids are [0, num_pages); ragged: 1
  int32_t num_ids = 0;    // ids in a row of the block table, or of all requests in CSR

  struct Row {
    int64_t first = 0;
    int32_t count = 0;
  };
  /// The range of `ids` that a request has. It never leaves the table, even if indptr holds wrong
  /// numbers.
  FLASHPLAN_HOST_DEVICE Row row_of(int32_t request) const {
    if (indptr == nullptr) return {request * row_stride, num_ids};
    const int32_t first = indptr[request];
    const int32_t behind = indptr[request + 1];
    if (first < 0 || first >= behind || first >= num_ids) return {};
    return {first, (behind < num_ids ? behind : num_ids) - first};
  }
  /// The most keys that the page ids of a request can name. For CSR the limit follows from indptr,
  /// which only the device knows. There is no limit for a block table, because the host knows its
  /// columns and refuses runs with too few.
  FLASHPLAN_HOST_DEVICE int32_t keys_of(int32_t request) const {
    if (indptr == nullptr) return 0x7fffffff;
    const int64_t keys = int64_t{row_of(request).count} * page_size.value;
    return keys < 0x7fffffff ? static_cast<int32_t>(keys) : 0x7fffffff;
  }
};

}  // namespace flashplan
