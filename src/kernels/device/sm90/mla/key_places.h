// SPDX-License-Identifier: Apache-2.0
// In which row of the cache a key lies.
#pragma once

#include "kernels/device/pages.h"

namespace flashplan::device {

/// A row of the cache.
struct KeyPlace {
  int32_t page;
  int32_t row;  // of the page; of ragged keys, which are one page, of the tensor
  bool exists;  // whether the cache has this row

  /// Where the row begins in a tensor of the cache, in elements.
  FLASHPLAN_DEVICE int64_t offset(const KvView& view) const {
    return page * view.page_stride + row * view.token_stride;
  }
};

/// Finds the keys of requests, one after the other: those of a page table, or of ragged tensors. It
/// takes two steps, because the first one loads from memory. `kv_row`: that of the request's
/// segment; `key`: number of the key in its request.
class KeyPlaces {
 public:
  explicit FLASHPLAN_DEVICE KeyPlaces(const AttentionParams& p) : p_(p) {}

  /// Starts to load the id of the key's page, which find() needs.
  FLASHPLAN_DEVICE int32_t request(int32_t kv_row, int32_t key) const {
    const PageTable& pages = p_.tensors.pages;
    if (pages.ids == nullptr) return 0;
    return static_cast<int32_t>(load_global_4(
        page_ids(pages, kv_row) + quotient(static_cast<uint32_t>(key), pages.page_size)));
  }

  /// `id`: what request() has returned.
  FLASHPLAN_DEVICE KeyPlace find(int32_t kv_row, int32_t key, int32_t id) const {
    const PageTable& pages = p_.tensors.pages;
    if (pages.ids == nullptr) return {0, kv_row + key, true};
    const auto page = static_cast<int32_t>(quotient(static_cast<uint32_t>(key), pages.page_size));
    return {id, key - page * pages.page_size.value, has_page(pages, static_cast<uint32_t>(id))};
  }

 private:
  const AttentionParams& p_;
};

}  // namespace flashplan::device
