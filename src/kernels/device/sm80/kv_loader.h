// SPDX-License-Identifier: Apache-2.0
// Loads tiles of q, k and v into shared memory from any layout: ragged rows, a block table or CSR,
// any page size, any strides.
#pragma once

#include "kernels/device/element.h"
#include "kernels/device/key_tail.h"
#include "kernels/device/pages.h"
#include "kernels/device/sm80/shared_tile.h"
#include "kernels/device/unaligned_copy.h"

namespace flashplan::device {

/// Copies rows [0, kRows) of a tile to shared memory by kThreads threads; the caller is number
/// `thread` of them. row_address(row) is null for a missing row. Missing rows, and dims beyond
/// `head_dim`, become zeros.
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
      cp_async_16(to, from + chunk * 16);
    } else {
      copy_unaligned_16<kBytes>(to, from + chunk * 16, num_valid);
    }
  }
}

/// The address of row `row` of a work tile's queries, for one kv head.
template <DType kQuery>
FLASHPLAN_DEVICE const unsigned char* query_row(const AttentionParams& p, const PackedRows& rows,
                                                int32_t kv_head, int row) {
  const Divisor& group_size = p.schedule.group_size;
  return static_cast<const unsigned char*>(p.tensors.q.data) +
         (rows.token(row, group_size) * p.tensors.q.token_stride +
          static_cast<uint32_t>(rows.qo_head(kv_head, row, group_size)) * p.tensors.q.head_stride) *
             Element<kQuery>::kBytes;
}

/// Where the rows of k and v of one key begin in memory.
struct alignas(16) KvRow {
  const unsigned char* k;
  const unsigned char* v;

  static constexpr int kPitch = 16;       // bytes from row to row of a table
  static constexpr int kValueOffset = 8;  // byte offset of v
};
static_assert(sizeof(KvRow) == KvRow::kPitch);

/// Walks through the key tiles of a work tile, head after head. Keys past the last key are replaced
/// by the last key, and keys before the first key that any row sees by that key. Any key would do
/// there, because its logits are masked or not computed.
template <DType kKv, int kTileKv, int kThreads>
class KvCursor {
 public:
  FLASHPLAN_DEVICE KvCursor(int32_t tile_begin, int32_t kv_head)
      : tile_begin_(tile_begin), kv_head_(kv_head) {}

  FLASHPLAN_DEVICE int32_t kv_head() const { return kv_head_; }
  FLASHPLAN_DEVICE int32_t tile_begin() const { return tile_begin_; }

  /// The tile kTiles later; after the last tile of a head come those of the next head.
  template <int kTiles>
  FLASHPLAN_DEVICE KvCursor later(KeySpan keys) const {
    KvCursor tile = *this;
    if (keys.end - tile_begin_ > kTiles * kTileKv) {
      tile.tile_begin_ += kTiles * kTileKv;
    } else {
      int num_tiles = 0;  // the index of the result among the tiles of its head
      if constexpr (kTiles > 1) {
        const int tiles_of_head = (keys.end - keys.begin - 1) / kTileKv + 1;
        num_tiles = kTiles - ((keys.end - tile_begin_ - 1) / kTileKv + 1);
        for (; num_tiles >= tiles_of_head; num_tiles -= tiles_of_head) ++tile.kv_head_;
      }
      ++tile.kv_head_;
      tile.tile_begin_ = keys.begin + num_tiles * kTileKv;
    }
    return tile;
  }

  /// For a paged cache: starts the copies of the page ids of the next kTiles tiles to shared memory
  /// at `to`. Each id is copied once, to the place of its page's first key in a tile, because
  /// repeated reads of one address would be serialised. `ids` is the request's row of the page
  /// table.
  template <int kTiles>
  FLASHPLAN_DEVICE void copy_page_ids(uint32_t to, const PageTable& pages, const int32_t* ids,
                                      KeySpan keys, int thread) const {
    const auto copy = [&](const KvCursor&, uint32_t key, int index) {
      const uint32_t page = quotient(key, pages.page_size);
      if (index % kTileKv == 0 || key == page * pages.page_size.value) {
        cp_async_4(to + index * 4, ids + page);
      }
    };
    if (is_of_one_head<kTiles>(keys)) {
      for_each_key_of_head<kTiles>(thread, copy);
    } else {
      for_each_key<kTiles>(keys, thread, copy);
    }
  }

  /// Writes the KvRows of the next kTiles tiles to `table`, given their page ids. `first_seen`: the
  /// first key that any row sees. `on_pages`: the address of TileContext::on_pages.
  template <int kTiles>
  FLASHPLAN_DEVICE void find_rows(uint32_t table, uint32_t page_ids, const AttentionParams& p,
                                  int32_t kv_row, KeySpan keys, int32_t first_seen,
                                  uint32_t on_pages, int thread) const {
    // If there are enough threads, each thread computes one address, of a row of k or of v.
    constexpr int kKeys = kTiles * kTileKv;
    constexpr bool kApart = kThreads >= 2 * kKeys;
    const bool is_k = thread < kKeys;
    const int place = kApart && !is_k ? thread - kKeys : thread;
    const auto find = [&](bool paged, const KvCursor& tile, uint32_t key, int index) {
      key = max(key, static_cast<uint32_t>(first_seen));
      uint32_t page = 0;
      uint32_t in_page = static_cast<uint32_t>(kv_row) + key;
      bool exists = true;
      if (paged) {
        in_page = row_in_page(p.tensors.pages, key);
        // The page id was copied to the place of the page's first key in the tile, which is the
        // first key of the tile if the page begins before the tile.
        const int key_of_tile = static_cast<int>(key) - tile.tile_begin_;
        const int first =
            index / kTileKv * kTileKv + key_of_tile - min(key_of_tile, static_cast<int>(in_page));
        page = load_shared_4(page_ids + first * 4);
        exists = has_page(p.tensors.pages, page);
      }
      const auto row = [&](const KvView& view) {
        return static_cast<const unsigned char*>(view.data) +
               (page * view.page_stride + in_page * view.token_stride +
                static_cast<uint32_t>(tile.kv_head_) * view.head_stride) *
                   Element<kKv>::kBytes;
      };
      const uint32_t to = table + index * KvRow::kPitch;
      const auto store = [&](auto row_of) {
        if constexpr (kApart) {
          store_shared_pointer(to + (is_k ? 0 : KvRow::kValueOffset),
                               row_of(is_k ? p.tensors.k : p.tensors.v));
        } else {
          store_shared_pointers(to, row_of(p.tensors.k), row_of(p.tensors.v));
        }
      };
      store(row);
      if (__builtin_expect(static_cast<long>(exists), 1L) != 0) return;
      store_shared_4(on_pages, kSomeOffPages);
      store([](const KvView&) { return zero_row(); });
    };
    // In the common case there is no branch between the keys of a thread, so that the latencies of
    // their loads overlap.
    const bool paged = p.tensors.pages.ids != nullptr;
    if (!is_of_one_head<kTiles>(keys)) {
      for_each_key<kTiles>(keys, place, [&](const KvCursor& tile, uint32_t key, int index) {
        find(paged, tile, key, index);
      });
    } else if (paged) {
      for_each_key_of_head<kTiles>(place, [&](const KvCursor& tile, uint32_t key, int index) {
        find(true, tile, key, index);
      });
    } else {
      for_each_key_of_head<kTiles>(place, [&](const KvCursor& tile, uint32_t key, int index) {
        find(false, tile, key, index);
      });
    }
  }

 private:
  /// Whether the next kTiles tiles are certain to be whole and of one head.
  template <int kTiles>
  FLASHPLAN_DEVICE bool is_of_one_head(KeySpan keys) const {
    return kTiles > 1 && keys.end - tile_begin_ >= kTiles * kTileKv;
  }

  /// Calls f(tile, key, index) for this thread's keys of the next kTiles tiles; `index` counts the
  /// keys of all these tiles. Handles as many tiles at a time as there are threads for.
  template <int kTiles, typename Function>
  FLASHPLAN_DEVICE void for_each_key(KeySpan keys, int thread, Function f) const {
    constexpr int kAtOnce = kTiles < kThreads / kTileKv ? kTiles : kThreads / kTileKv;
    static_assert(kThreads % kTileKv == 0 && kTiles % kAtOnce == 0);
    const int in_tile = thread & (kTileKv - 1);
    const int place = static_cast<int>(static_cast<uint32_t>(thread) / kTileKv);
    if (place >= kAtOnce) return;
    KvCursor tile = *this;
#pragma unroll
    for (int i = 1; i < kAtOnce; ++i) {
      if (i <= place) tile = tile.template later<1>(keys);
    }
#pragma unroll
    for (int i = 0; i < kTiles; i += kAtOnce) {
      const int key = tile.tile_begin_ + min(in_tile, keys.end - 1 - tile.tile_begin_);
      f(tile, static_cast<uint32_t>(key), (i + place) * kTileKv + in_tile);
      if (i + kAtOnce < kTiles) tile = tile.template later<kAtOnce>(keys);
    }
  }

  /// Does what for_each_key() does, for tiles that is_of_one_head() is true for.
  template <int kTiles, typename Function>
  FLASHPLAN_DEVICE void for_each_key_of_head(int thread, Function f) const {
    static_assert(kTiles * kTileKv % kThreads == 0 || kTiles * kTileKv < kThreads);
    if (thread >= kTiles * kTileKv) return;
    const int in_tile = thread & (kTileKv - 1);
#pragma unroll
    for (int first = 0; first < kTiles * kTileKv; first += kThreads) {
      const int index = first + thread;
      const KvCursor tile(tile_begin_ + index - in_tile, kv_head_);
      f(tile, static_cast<uint32_t>(tile_begin_ + index), index);
    }
  }

  int32_t tile_begin_;
  int32_t kv_head_;
};

/// Copies rows to shared memory by all threads, 16 bytes at a time. At least 8 lanes copy a row (4
/// if it has no multiple of 128 bytes), so that they read whole 128-byte lines. If there are enough
/// threads, more lanes copy a row, so that each thread holds fewer addresses.
template <int kBytes, int kHeadDim, int kRows, int kThreads>
struct TileCopy {
  using Tile = SharedTile<kHeadDim * kBytes>;
  static constexpr int kWholeLines = Tile::kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kLanesPerRow =
      kWholeLines > kThreads / kRows ? kWholeLines : kThreads / kRows;
  static_assert(Tile::kChunks % kLanesPerRow == 0);
  static constexpr int kRowStep = kThreads / kLanesPerRow;
  static constexpr int kRowsPerThread = kRows / kRowStep;
  static_assert(kRows % kRowStep == 0);

  /// The i-th of this thread's rows.
  static FLASHPLAN_DEVICE int row(int i, int thread) {
    return static_cast<int>(static_cast<uint32_t>(thread) / kLanesPerRow) + i * kRowStep;
  }
  /// Starts this thread's copies of its i-th row, which is at `from`.
  static FLASHPLAN_DEVICE void copy(uint32_t tile, const unsigned char* from, int i, int thread) {
    const int lane = thread & (kLanesPerRow - 1);
    // If a thread's rows are a multiple of 8 apart, SharedTile permutes all of them alike, so that
    // one address register is enough for them.
    const uint32_t to =
        tile + (kRowStep % 8 == 0 ? Tile::offset(row(0, thread), lane) +
                                        static_cast<uint32_t>(i * kRowStep * Tile::kRowBytes)
                                  : Tile::offset(row(i, thread), lane));
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; chunk += kLanesPerRow) {
      cp_async_16(to + chunk * 16, from + lane * 16 + chunk * 16);
    }
  }

  /// Starts all of this thread's copies of rows with `head_dim` <= kHeadDim dims. `vectorized`:
  /// rows can be copied 16 bytes at a time. Missing dims become zeros.
  static __device__ __noinline__ void copy_any(uint32_t tile, uint32_t table, int head_dim,
                                               bool vectorized, int thread) {
    if (!vectorized) {
      copy_tile<kBytes, kHeadDim, kRows, kThreads>(tile, head_dim, false, thread, [&](int row) {
        return load_shared_pointer(table + row * KvRow::kPitch);
      });
      return;
    }
    const int lane = thread & (kLanesPerRow - 1);
    const unsigned char* from[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      from[i] = load_shared_pointer(table + row(i, thread) * KvRow::kPitch);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const uint32_t to = tile + Tile::offset(row(i, thread), lane);
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; chunk += kLanesPerRow) {
        const bool has_dims = (lane + chunk) * 16 < head_dim * kBytes;
        cp_async_16_padded(to + chunk * 16, from[i] + (has_dims ? (lane + chunk) * 16 : 0),
                           has_dims ? 16 : 0);
      }
    }
  }
};

/// Copies ragged keys whose dims are in two tensors to shared memory by all threads: the keys of
/// the tile that begins at key `tile_begin`. `table` has the addresses of their rows of k. `seen`:
/// the keys from the first key that any row sees to the last key. `kv_row`: the first row of the
/// request.
template <int kBytes, int kHeadDim, int kRows, int kThreads>
FLASHPLAN_DEVICE void copy_key_parts(uint32_t tile, uint32_t table, const AttentionParams& p,
                                     int32_t kv_row, KeySpan seen, int32_t tile_begin, int thread) {
  using Tile = SharedTile<kHeadDim * kBytes>;
#pragma unroll 1
  for (int i = thread; i < kRows * Tile::kChunks; i += kThreads) {
    const int row = i / Tile::kChunks;
    const int chunk = i % Tile::kChunks;
    const int32_t key = min(max(tile_begin + row, seen.begin), seen.end - 1);
    const auto parts = KeyParts::of<kBytes>(p, load_shared_pointer(table + row * KvRow::kPitch),
                                            int64_t{kv_row} + key);
    copy_parts_16<kBytes>(tile + Tile::offset(row, chunk), parts, chunk * (16 / kBytes),
                          p.tensors.vectorized);
  }
}

}  // namespace flashplan::device
