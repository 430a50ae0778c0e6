// SPDX-License-Identifier: Apache-2.0
// Page ids. Keys whose page ids are outside of the cache are hidden, and read as zeros.
#pragma once

#include "kernels/device/row_block.h"

namespace flashplan::device {

/// The page ids of a row of the page table, or null for ragged keys, which have no pages. The row
/// has the ids of the first PageTable::keys_of() keys; later ids must not be read.
FLASHPLAN_DEVICE const int32_t* page_ids(const PageTable& pages, int32_t row) {
  if (pages.ids == nullptr) return nullptr;
  return pages.ids +
         (pages.indptr != nullptr ? int64_t{pages.indptr[row]} : row * pages.row_stride);
}

/// A CTA has a word in shared memory that says whether the page ids of all keys are inside of the
/// cache: it is kAllOnPages, and becomes kSomeOffPages when a key that some row sees has a page id
/// outside of the cache. Then the masks of all steps look at the page id of each key. The sm80
/// kernels mask a step if it ends behind the minimum of this word and the end of the keys that all
/// rows see, so the word needs no branch of its own.
constexpr int32_t kAllOnPages = 0x7fffffff;
constexpr int32_t kSomeOffPages = 0;

/// Whether a page id is inside of the cache. Keys and values with other ids are replaced by zeros.
FLASHPLAN_DEVICE bool has_page(const PageTable& pages, uint32_t id) {
  return id < static_cast<uint32_t>(pages.num_pages);
}

/// Starts to load the id of a key's page. `ids`: the page ids of its request.
FLASHPLAN_DEVICE uint32_t request_page_id(const PageTable& pages, const int32_t* ids, int32_t key) {
  return load_global_4(ids + quotient(static_cast<uint32_t>(key), pages.page_size));
}
/// The row of a key in its page.
FLASHPLAN_DEVICE uint32_t row_in_page(const PageTable& pages, uint32_t key) {
  return key - quotient(key, pages.page_size) * static_cast<uint32_t>(pages.page_size.value);
}

/// Whether the page id of a key is inside of the cache. `ids`: the page ids of its request.
FLASHPLAN_DEVICE bool is_on_page(const PageTable& pages, const int32_t* ids, int32_t key) {
  return has_page(pages, request_page_id(pages, ids, key));
}

/// One bit for each of `num_columns` columns, up to 32, of a thread's accumulators: whether the
/// page id of the column's key is inside of the cache. `first`: the key of the first column.
/// Columns from key `end` on are not looked up.
FLASHPLAN_DEVICE uint32_t columns_on_pages(const PageTable& pages, const int32_t* ids,
                                           int32_t first, int32_t end, int num_columns) {
  uint32_t columns = 0;
#pragma unroll 1
  for (int i = 0; i < num_columns; ++i) {
    const int32_t key = first + i / 2 * 8 + i % 2;
    if (key < end && is_on_page(pages, ids, key)) columns |= 1U << i;
  }
  return columns;
}

/// A row of zeros, for keys whose page id is outside of the cache.
constexpr int kMostRowBytes = 1024;
static __device__ const uint4 zeros[kMostRowBytes / 16] = {};
FLASHPLAN_DEVICE const unsigned char* zero_row() {
  return reinterpret_cast<const unsigned char*>(zeros);
}

}  // namespace flashplan::device
