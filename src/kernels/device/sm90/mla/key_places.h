// SPDX-License-Identifier: Apache-2.0
// In which row of the cache a key lies.
#pragma once

#include "kernels/device/pages.h"

namespace flashplan::device {

/// A row of the cache.
struct KeyPlace {
  int32_t page;
  int32_t row;  // in the page; ragged keys are one page, so there it is the row of the tensor
  bool exists;  // whether the cache has this row

  /// Where the row begins in a tensor of the cache, in elements.
  FLASHPLAN_DEVICE int64_t offset(const KvView& view) const {
    return page * view.page_stride + row * view.token_stride;
  }
};

/// Finds in which row of the cache a key lies: by a page table, by a list of keys, or in ragged
/// tensors. This takes two calls: request() starts to load an id from memory, and find() takes this
/// id. `kv_row`: the request's row of the page table or lists, or its first row of ragged keys.
/// `key`: number of the key in its request.
class KeyPlaces {
 public:
  explicit FLASHPLAN_DEVICE KeyPlaces(const AttentionParams& p) : p_(p) {}

  FLASHPLAN_DEVICE bool are_listed() const { return p_.lists.slots != nullptr; }

  /// The address of the id that find() needs: that of the key's page, or the key's entry in the
  /// list. Null for ragged keys, which need none. Lists have entries for all keys of a work tile,
  /// because MlaRecordLoader ends the tile where the list ends.
  FLASHPLAN_DEVICE const int32_t* id_place(int32_t kv_row, int32_t key) const {
    const PageTable& pages = p_.tensors.pages;
    if (are_listed()) return p_.lists.slots + kv_row * p_.lists.row_stride + key;
    if (pages.ids == nullptr) return nullptr;
    return page_ids(pages, kv_row) + quotient(static_cast<uint32_t>(key), pages.page_size);
  }
  /// Starts to load the id that find() needs.
  FLASHPLAN_DEVICE int32_t request(int32_t kv_row, int32_t key) const {
    const int32_t* from = id_place(kv_row, key);
    return from == nullptr ? 0 : static_cast<int32_t>(load_global_4(from));
  }

  /// `id`: what request() has returned.
  FLASHPLAN_DEVICE KeyPlace find(int32_t kv_row, int32_t key, int32_t id) const {
    const PageTable& pages = p_.tensors.pages;
    if (!are_listed() && pages.ids == nullptr) return {0, kv_row + key, true};
    const int32_t slot = are_listed() ? id : key;
    const auto page = static_cast<int32_t>(quotient(static_cast<uint32_t>(slot), pages.page_size));
    const int32_t row = slot - page * pages.page_size.value;
    if (!are_listed()) return {id, row, has_page(pages, static_cast<uint32_t>(id))};
    return {page, row, slot >= 0 && has_page(pages, static_cast<uint32_t>(page))};
  }

 private:
  const AttentionParams& p_;
};

}  // namespace flashplan::device
