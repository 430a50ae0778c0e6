// SPDX-License-Identifier: Apache-2.0
// Finds where the keys and values of a tile lie in memory.
#pragma once

#include "kernels/device/sm80/kv_loader.h"

namespace flashplan::device {

/// Finds the addresses of the rows that a group of lanes copies in TileCopy. These lanes find them
/// alone, so that no warp waits for another one. Even lanes find rows of keys, odd lanes rows of
/// values. Page ids are loaded to registers at least a step before they are used, because a load
/// waits behind the copies that are under way.
template <typename T>
class RowFinder {
  using Copy = TileCopy<Element<T::kKv>::kBytes, T::kHeadDimQk, T::kTileKv, T::kThreads>;
  using ValueCopy = TileCopy<Element<T::kKv>::kBytes, T::kHeadDimVo, T::kTileKv, T::kThreads>;
  static constexpr int kLanes = Copy::kLanesPerRow;
  // A group of lanes finds kRowAddresses addresses, and each lane at most kAddresses of them.
  static constexpr int kRowAddresses = 2 * Copy::kRowsPerThread;
  static constexpr int kAddresses = (kRowAddresses + kLanes - 1) / kLanes;

 public:
  using Cursor = KvCursor<T::kKv, T::kTileKv, T::kThreads>;
  /// Whether kernels use RowFinder. With one CTA per SM, for example with 256 dims, no registers
  /// are left for it.
  static constexpr bool kIsSupported =
      T::kCtasPerSm == 2 && Copy::kLanesPerRow == ValueCopy::kLanesPerRow;

  /// A lane's row addresses in a tile. Each consists of the address that the row would have in page
  /// 0, and of its page id.
  struct Rows {
    const unsigned char* in_page[kAddresses];
    uint32_t pages[kAddresses];
  };

  FLASHPLAN_DEVICE RowFinder(const AttentionParams& p, int thread) : thread_(thread) {
    const KvView& view = is_value() ? p.tensors.v : p.tensors.k;
    constexpr int kBytes = Element<T::kKv>::kBytes;
    data_ = static_cast<const unsigned char*>(view.data);
    page_stride_ = view.page_stride * kBytes;
    token_stride_ = view.token_stride * kBytes;
    head_stride_ = view.head_stride * kBytes;
  }

  /// Requests the page ids of `tile`. `ids`: the page ids of the request, or null for ragged keys,
  /// which begin at row `kv_row` of k and v. `first_seen`: the first key that any query row sees.
  /// It replaces the keys before it, and the last key replaces the keys past it.
  FLASHPLAN_DEVICE void request(Rows& rows, const Cursor& tile, const KeySpan& keys,
                                int32_t first_seen, const PageTable& pages, const int32_t* ids,
                                int32_t kv_row) const {
    uint32_t row[kAddresses];  // the key's number in the request, then its row in its page or in
                               // ragged k and v
#pragma unroll
    for (int a = 0; a < kAddresses; ++a) {
      const int32_t key = max(tile.tile_begin() + row_of(a), first_seen);
      row[a] = static_cast<uint32_t>(min(key, keys.end - 1));
      rows.pages[a] = 0;
    }
    if (ids != nullptr) {
#pragma unroll
      for (int a = 0; a < kAddresses; ++a) {
        const uint32_t page = quotient(row[a], pages.page_size);
        rows.pages[a] = load_global_4(ids + page);
        row[a] -= page * static_cast<uint32_t>(pages.page_size.value);
      }
    } else {
#pragma unroll
      for (int a = 0; a < kAddresses; ++a) row[a] += static_cast<uint32_t>(kv_row);
    }
    const unsigned char* head = data_ + static_cast<uint32_t>(tile.kv_head()) * head_stride_;
#pragma unroll
    for (int a = 0; a < kAddresses; ++a) rows.in_page[a] = head + row[a] * token_stride_;
  }

  /// Writes the addresses to `table`, which has a KvRow for each key of the tile. `on_pages`: the
  /// address of TileContext::on_pages.
  FLASHPLAN_DEVICE void store(const Rows& rows, const PageTable& pages, uint32_t table,
                              uint32_t on_pages) const {
    bool exist = true;
#pragma unroll
    for (int a = 0; a < kAddresses; ++a) {
      exist = exist && has_page(pages, rows.pages[a]);
      if (has_address(a)) {
        store_shared_pointer(place(table, a), rows.in_page[a] + rows.pages[a] * page_stride_);
      }
    }
    if (__builtin_expect(static_cast<long>(exist), 1L) != 0) return;
    store_shared_4(on_pages, kSomeOffPages);
#pragma unroll
    for (int a = 0; a < kAddresses; ++a) {
      if (has_address(a) && !has_page(pages, rows.pages[a])) {
        store_shared_pointer(place(table, a), zero_row());
      }
    }
  }

 private:
  static_assert(kLanes % 2 == 0);
  FLASHPLAN_DEVICE bool is_value() const { return (thread_ & 1) != 0; }
  /// The number of this lane's a-th address among the addresses that its group of lanes finds: key
  /// and value of the group's first row, of its second row, ...
  FLASHPLAN_DEVICE int number(int a) const { return a * kLanes + (thread_ & (kLanes - 1)); }
  FLASHPLAN_DEVICE int row_of(int a) const {
    return Copy::row(0, thread_) + number(a) / 2 * Copy::kRowStep;
  }
  /// Whether this lane has an a-th address.
  FLASHPLAN_DEVICE bool has_address(int a) const {
    return kRowAddresses % kLanes == 0 || number(a) < kRowAddresses;
  }
  /// Where the a-th address is stored in `table`.
  FLASHPLAN_DEVICE uint32_t place(uint32_t table, int a) const {
    return table + row_of(a) * KvRow::kPitch + (is_value() ? KvRow::kValueOffset : 0);
  }

  const int thread_;
  // The tensor whose rows this lane finds, k or v; strides are in bytes.
  const unsigned char* data_;
  int64_t page_stride_;
  int64_t token_stride_;
  int64_t head_stride_;
};

}  // namespace flashplan::device
