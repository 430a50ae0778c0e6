// SPDX-License-Identifier: Apache-2.0
// Brings tiles of q, k and v from any layout to shared memory: ragged rows, a block table or CSR,
// any page size, any strides.
#pragma once

#include "kernels/device/numeric.h"
#include "kernels/device/row_block.h"
#include "kernels/device/shared_tile.h"

namespace flashplan::device {

/// Copies 16 bytes of a row that may start anywhere, element by element; zeros from `num_valid` on.
template <int kBytes>
FLASHPLAN_DEVICE void copy_unaligned_16(uint32_t to, const unsigned char* from, int num_valid) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    if (i < num_valid) {
      const uint32_t element =
          kBytes == 1 ? from[i] : *reinterpret_cast<const uint16_t*>(from + i * kBytes);
      words[i * kBytes / 4] |= element << (i * kBytes % 4 * 8);
    }
  }
  store_shared_16(to, {words[0], words[1], words[2], words[3]});
}

/// Copies rows [0, kRows) of a tile to shared memory by kThreads threads, of which this is number
/// `thread`; row_address(row) is null where there is none: zeros, as beyond `head_dim`.
template <int kBytes, int kHeadDim, int kRows, int kThreads, typename RowAddress>
FLASHPLAN_DEVICE void copy_tile(uint32_t tile, int head_dim, bool vectorized, int thread,
                                RowAddress row_address) {
  using Tile = SharedTile<kHeadDim * kBytes>;
#pragma unroll 1
  for (int i = thread; i < kRows * Tile::kChunks; i += kThreads) {
    const int row = i / Tile::kChunks;
    const int chunk = i % Tile::kChunks;
    const unsigned char* from = row_address(row);
    const int num_valid = from == nullptr ? 0 : head_dim - chunk * (16 / kBytes);
    const uint32_t to = tile + Tile::offset(row, chunk);
    if (vectorized && num_valid > 0) {
      cp_async_16(to, from + chunk * 16, true);
    } else {
      copy_unaligned_16<kBytes>(to, from + chunk * 16, num_valid);
    }
  }
}

/// Where row `row` of a work tile's queries lies, for one kv head.
template <DType kQ>
FLASHPLAN_DEVICE const unsigned char* query_row(const AttentionParams& p, const RowBlock& rows,
                                                int32_t kv_head, int row) {
  return static_cast<const unsigned char*>(p.q) +
         (rows.token(p, row) * p.q_token_stride +
          int64_t{rows.qo_head(p, kv_head, row)} * p.q_head_stride) *
             Element<kQ>::kBytes;
}

/// Page ids of a request; null: ragged.
FLASHPLAN_DEVICE const int32_t* page_ids(const PageTable& pages, int32_t request) {
  if (pages.ids == nullptr) return nullptr;
  return pages.ids +
         (pages.indptr != nullptr ? int64_t{pages.indptr[request]} : request * pages.row_stride);
}

/// Where the rows of a key lie.
struct alignas(16) KvRow {
  const unsigned char* k;
  const unsigned char* v;

  static constexpr int kPitch = 16;       // bytes from row to row of a table
  static constexpr int kValueOffset = 8;  // of v
};
static_assert(sizeof(KvRow) == KvRow::kPitch);

/// A tile of keys of a work tile, on the way through its keys, head after head. Keys past the last
/// one are the last one again: their logits are masked, or never asked for.
template <DType kKv, int kTileKv, int kThreads>
class KvCursor {
 public:
  FLASHPLAN_DEVICE KvCursor(KeySpan keys, int32_t kv_head)
      : kv_head_(kv_head), tile_begin_(keys.begin) {}

  FLASHPLAN_DEVICE int32_t kv_head() const { return kv_head_; }
  FLASHPLAN_DEVICE int32_t tile_begin() const { return tile_begin_; }

  /// Moves to the next tile, of the next head after the last one.
  FLASHPLAN_DEVICE void advance(KeySpan keys) {
    // In two steps: tile_begin_ + kTileKv might overflow.
    if (keys.end - tile_begin_ > kTileKv) {
      tile_begin_ += kTileKv;
    } else {
      tile_begin_ = keys.begin;
      ++kv_head_;
    }
  }

  /// Starts to bring the page ids of the keys to shared memory at `to`: one per page, to the place
  /// of its first key here, since copies from one address wait for each other. `ids` are the
  /// request's.
  FLASHPLAN_DEVICE void copy_page_ids(uint32_t to, const PageTable& pages, const int32_t* ids,
                                      KeySpan keys, int thread) const {
    if (pages.ids == nullptr) return;
#pragma unroll
    for (int i = 0; i < kTileKv; i += kThreads) {
      const int index = i + thread;
      const uint32_t key = this->key(keys, index);
      const uint32_t page = quotient(key, pages.page_size);
      const bool is_first = index == 0 || key == page * pages.page_size.value;
      if (is_first && (kTileKv % kThreads == 0 || index < kTileKv)) {
        cp_async_4(to + index * 4, ids + page);
      }
    }
  }

  /// Writes the KvRows of the keys to `table`, given their page ids.
  FLASHPLAN_DEVICE void find_rows(uint32_t table, uint32_t page_ids, const AttentionParams& p,
                                  int32_t request_kv_begin, KeySpan keys, int thread) const {
#pragma unroll
    for (int i = 0; i < 2 * kTileKv; i += kThreads) {  // first k, then v
      const int item = i + thread;
      if (2 * kTileKv % kThreads != 0 && item >= 2 * kTileKv) return;
      const bool is_k = item < kTileKv;
      const int index = item % kTileKv;
      const uint32_t key = this->key(keys, index);
      int64_t page = 0;
      int64_t slot = int64_t{request_kv_begin} + key;
      if (p.pages.ids != nullptr) {
        const uint32_t slot_in_page =
            key - quotient(key, p.pages.page_size) * static_cast<uint32_t>(p.pages.page_size.value);
        // Not before this tile, where the page may begin.
        const int first =
            max(static_cast<int>(key) - tile_begin_ - static_cast<int>(slot_in_page), 0);
        page = static_cast<int32_t>(load_shared_4(page_ids + first * 4));
        slot = slot_in_page;
      }
      const KvView& view = is_k ? p.k : p.v;
      const unsigned char* row =
          static_cast<const unsigned char*>(view.data) +
          (page * view.page_stride + slot * view.token_stride + kv_head_ * view.head_stride) *
              Element<kKv>::kBytes;
      store_shared_pointer(table + index * KvRow::kPitch + (is_k ? 0 : KvRow::kValueOffset), row);
    }
  }

 private:
  FLASHPLAN_DEVICE uint32_t key(KeySpan keys, int index) const {
    return static_cast<uint32_t>(tile_begin_ + min(index, keys.end - 1 - tile_begin_));
  }

  int32_t kv_head_;
  int32_t tile_begin_;
};

/// Rows of one of k and v on their way to shared memory, copied by all threads, 16 bytes at a time.
template <int kBytes, int kHeadDim, int kRows, int kThreads>
struct TileCopy {
  using Tile = SharedTile<kHeadDim * kBytes>;
  static constexpr int kCopies = kRows * Tile::kChunks / kThreads;  // of a thread
  static_assert(kRows * Tile::kChunks % kThreads == 0);

  /// The row of this thread's copy i.
  static FLASHPLAN_DEVICE int row(int i, int thread) {
    return kThreads % Tile::kChunks == 0 ? thread / Tile::kChunks + i * (kThreads / Tile::kChunks)
                                         : (i * kThreads + thread) / Tile::kChunks;
  }
  /// Starts copy i, from the row at `from`, if `valid`.
  static FLASHPLAN_DEVICE void copy(uint32_t tile, const unsigned char* from, int i, bool valid,
                                    int thread) {
    constexpr int kRowStep = kThreads / Tile::kChunks;
    if constexpr (kThreads % Tile::kChunks == 0 && kRowStep % 8 == 0) {
      // A thread's rows have one chunk number and one permutation.
      const int chunk = thread % Tile::kChunks;
      cp_async_16(tile + Tile::offset(row(0, thread), chunk) + i * kRowStep * Tile::kRowBytes,
                  from + chunk * 16, valid);
    } else {
      const int chunk = (i * kThreads + thread) % Tile::kChunks;
      cp_async_16(tile + Tile::offset(row(i, thread), chunk), from + chunk * 16, valid);
    }
  }

  /// All copies, for rows of any alignment and of `head_dim` <= kHeadDim.
  static __device__ __noinline__ void copy_unaligned(uint32_t tile, uint32_t table, int head_dim,
                                                     int thread) {
    copy_tile<kBytes, kHeadDim, kRows, kThreads>(tile, head_dim, false, thread, [&](int row) {
      return load_shared_pointer(table + row * KvRow::kPitch);
    });
  }
};

}  // namespace flashplan::device
