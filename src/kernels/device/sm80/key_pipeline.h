// SPDX-License-Identifier: Apache-2.0
// Copies keys and values of a work tile to shared memory, some tiles of keys ahead of the
// arithmetic.
#pragma once

#include "kernels/device/sm80/row_finder.h"
#include "kernels/device/sm80/tile_context.h"

namespace flashplan::device {

/// Two rings in shared memory: entry i % kEntries has the row addresses of tile i, and stage i %
/// kStages its keys and values. The step that uses tile i issues the copies of the keys and values
/// of tile i + kStages - 1, and computes the row addresses of tile i + kStages. The page ids of
/// these addresses are requested earlier. For few rows this is one step earlier, to registers
/// (RowFinder). For many rows, where no registers are left, it is kStages - 1 steps earlier, to a
/// third ring. All threads of the CTA make the same calls.
template <typename T, typename S>
class KeyPipeline {
 public:
  using Cursor = KvCursor<T::kKv, T::kTileKv, T::kThreads>;
  using Finder = RowFinder<T>;
  static constexpr bool kFindsOwnRows =
      S::kTilesAtOnce == 1 && S::kQueryInStage && Finder::kIsSupported;

  FLASHPLAN_DEVICE KeyPipeline(const AttentionParams& p, TileContext& context, uint32_t base,
                               int thread)
      : p_(p),
        context_(context),
        block_(context_.block),
        base_(base),
        thread_(thread),
        copies_16_bytes_(p.tensors.vectorized && !has_key_tail(p) &&
                         p.tensors.head_dim_qk == T::kHeadDimQk &&
                         p.tensors.head_dim_vo == T::kHeadDimVo),
        next_(block_.keys.begin, context_.tile.kv_head),
        asked_(next_),
        finder_(p, thread) {}

  /// Whether all rows of q, k and v have all dims of the kernel, in one tensor each, and can be
  /// copied 16 bytes at a time.
  FLASHPLAN_DEVICE bool copies_16_bytes() const { return copies_16_bytes_; }
  /// The stage of the current tile.
  FLASHPLAN_DEVICE int stage() const { return stage_of(entry_); }
  /// The stage of the tile before it.
  FLASHPLAN_DEVICE int stage_before() const { return stage_of(later(entry_, S::kEntries - 1)); }
  FLASHPLAN_DEVICE uint32_t stage_address(int stage) const {
    return base_ + S::kFirstStage + stage * S::kStageBytes;
  }

  /// Starts the copies of the first tiles.
  FLASHPLAN_DEVICE void fill() {
    const KeySpan keys = block_.keys;
    const Cursor first = next_;
    if constexpr (kFindsOwnRows) {
      if (p_.tensors.pages.ids != nullptr) ids_ = request_ids();
      typename Finder::Rows rows[S::kStages];
#pragma unroll
      for (int entry = 0; entry < S::kStages; ++entry) request_rows(rows[entry], keys);
      if (context_.tile.merge >= 0) prepare_merge(p_, context_, thread_);
#pragma unroll
      for (int entry = 0; entry < S::kStages; ++entry) {
        finder_.store(rows[entry], p_.tensors.pages, table_address(entry), on_pages());
      }
      request_rows(rows_, keys);
      // Where rows are not copied 16 bytes at a time, warps copy rows whose addresses other warps
      // store, so all warps must wait for each other.
      copies_16_bytes_ ? __syncwarp() : __syncthreads();
    } else {
#pragma unroll 1
      for (int entry = 0; entry < S::kStages; ++entry) {
        copy_page_ids(entry, keys, [&] { return asked_; });
        asked_ = asked_.template later<1>(keys);
      }
      if (context_.tile.merge >= 0) prepare_merge(p_, context_, thread_);
      cp_async_commit();
      if (p_.tensors.pages.ids != nullptr) {
        cp_async_wait<0>();
        __syncthreads();
      }
#pragma unroll 1
      for (int entry = 0; entry < S::kStages; ++entry) {
        find_rows(entry, keys, [&] { return next_; });
        next_ = next_.template later<1>(keys);
      }
      __syncthreads();
      next_ = first;
    }
#pragma unroll 1
    for (int entry = 0; entry < S::kStages - 1; ++entry) {
      if (begin_issue(entry, next_, first.kv_head())) copy_keys_and_values(entry);
      if constexpr (!kFindsOwnRows) {
        copy_page_ids(later(entry, S::kStages), keys, [&] { return asked_; });
        asked_ = asked_.template later<1>(keys);
      }
      cp_async_commit();
      next_ = next_.template later<1>(keys);
    }
  }

  /// Waits until the next tile has arrived. `is_first`: it is the first tile of a head.
  FLASHPLAN_DEVICE void wait(bool is_first) const {
    // If the queries of a head have a buffer of their own, they are the latest group of copies, so
    // this waits for all groups.
    if (!S::kQueryInStage && S::kStages > 2 && is_first) {
      cp_async_wait<0>();
    } else {
      cp_async_wait<S::kStages - 2>();
    }
    __syncthreads();
  }

  /// Begins the step that uses `tile`. `keys`: the keys of the work tile. Returns what must be
  /// passed to copy() as `copies`: whether it has to copy keys and values.
  FLASHPLAN_DEVICE bool begin_step(const Cursor& tile, const KeySpan& keys) const {
    return begin_issue(later(entry_, S::kStages - 1),
                       kEachStep ? next_ : tile.template later<S::kStages - 1>(keys),
                       tile.kv_head());
  }

  /// Starts this thread's copies of a later tile, and of page ids. Must be called once in each
  /// step.
  FLASHPLAN_DEVICE void copy(bool copies, const Cursor& tile, const KeySpan& keys) const {
    if (copies) copy_keys_and_values(later(entry_, S::kStages - 1));
    if constexpr (!kFindsOwnRows) {
      const KeySpan& own_keys = rarely_read(keys);
      copy_page_ids(later(entry_, 2 * S::kStages - 1), own_keys, [&] {
        return kEachStep ? asked_ : tile.template later<2 * S::kStages - 1>(own_keys);
      });
    }
    cp_async_commit();
  }

  FLASHPLAN_DEVICE void end_step(const Cursor& tile, const KeySpan& keys) {
    if (kEachStep) next_ = next_.template later<1>(keys);
    if constexpr (kFindsOwnRows) {
      finder_.store(rows_, p_.tensors.pages, table_address(later(entry_, S::kStages)), on_pages());
      if (asked_.kv_head() == tile.kv_head() || asked_.kv_head() < context_.heads_end()) {
        request_rows(rows_, keys);
      }
    } else {
      if (kEachStep) asked_ = asked_.template later<1>(keys);
      const KeySpan& own_keys = rarely_read(keys);
      find_rows(later(entry_, S::kStages), own_keys,
                [&] { return kEachStep ? next_ : tile.template later<S::kStages>(own_keys); });
    }
    entry_ = later(entry_, 1);
  }

 private:
  // Whether every step computes row addresses. If not, the steps that compute them derive next_,
  // asked_ and the keys anew, so that these hold no registers in the other steps.
  static constexpr bool kEachStep = S::kTilesAtOnce == 1;

  FLASHPLAN_DEVICE const KeySpan& rarely_read(const KeySpan& keys) const {
    return kEachStep ? keys : block_.keys;
  }

  static FLASHPLAN_DEVICE bool has_key_tail(const AttentionParams& p) {
    return T::kTakesKeyTails && p.tensors.has_key_tail;
  }
  static FLASHPLAN_DEVICE int stage_of(uint32_t entry) { return entry % S::kStages; }
  static FLASHPLAN_DEVICE int later(int entry, int distance) {
    entry += distance % S::kEntries;
    return entry < S::kEntries ? entry : entry - S::kEntries;
  }
  FLASHPLAN_DEVICE uint32_t table_address(int entry) const {
    return base_ + FLASHPLAN_OFFSET_OF(typename S::Header, tables) + entry * S::kTableBytes;
  }
  FLASHPLAN_DEVICE uint32_t ids_address(int entry) const {
    return base_ + FLASHPLAN_OFFSET_OF(typename S::Header, ids) + entry * S::kIdBytes;
  }
  /// The page ids of the request, or null for ragged keys.
  FLASHPLAN_DEVICE const int32_t* request_ids() const {
    return reinterpret_cast<const int32_t*>(
        load_shared_pointer(shared_address(&context_.page_ids)));
  }
  /// The address of TileContext::on_pages.
  FLASHPLAN_DEVICE uint32_t on_pages() const { return shared_address(&context_.on_pages); }
  /// Requests the page ids of the tile `asked_`, and sets `asked_` to the next tile.
  FLASHPLAN_DEVICE void request_rows(typename Finder::Rows& rows, const KeySpan& keys) {
    finder_.request(rows, asked_, keys, context_.first_seen, p_.tensors.pages, ids_, block_.kv_row);
    asked_ = asked_.template later<1>(keys);
  }
  /// If `entry` is the first of a group of kTilesAtOnce entries, starts the copies of the page ids
  /// of kTilesAtOnce tiles, from tile() on, to these entries. Else does nothing.
  template <typename Tile>
  FLASHPLAN_DEVICE void copy_page_ids(int entry, const KeySpan& keys, Tile tile) const {
    if (entry % S::kTilesAtOnce != 0 || p_.tensors.pages.ids == nullptr) return;
    tile().template copy_page_ids<S::kTilesAtOnce>(ids_address(entry), p_.tensors.pages,
                                                   request_ids(), keys, opaque(thread_));
  }
  /// If `entry` is the first of a group of kTilesAtOnce entries, computes the row addresses of
  /// kTilesAtOnce tiles, from tile() on, from the page ids in these entries. Else does nothing.
  template <typename Tile>
  FLASHPLAN_DEVICE void find_rows(int entry, const KeySpan& keys, Tile tile) const {
    if (entry % S::kTilesAtOnce != 0) return;
    tile().template find_rows<S::kTilesAtOnce>(table_address(entry), ids_address(entry), p_,
                                               block_.kv_row, keys, context_.first_seen, on_pages(),
                                               opaque(thread_));
  }

  using KeyCopy = TileCopy<Element<T::kKv>::kBytes, T::kHeadDimQk, T::kTileKv, T::kThreads>;
  using ValueCopy = TileCopy<Element<T::kKv>::kBytes, T::kHeadDimVo, T::kTileKv, T::kThreads>;

  /// Begins to copy a tile to its stage, unless it lies past the last head. With the first tile of
  /// a head the queries are copied, too. Rows that are not aligned, are in two tensors, or have
  /// fewer dims than the kernel, are copied here. For all other rows this returns true, and
  /// copy_keys_and_values() must follow.
  FLASHPLAN_DEVICE bool begin_issue(int entry, const Cursor& tile, int32_t head) const {
    if (tile.kv_head() != head && tile.kv_head() >= context_.heads_end()) return false;
    const uint32_t to = stage_address(stage_of(entry));
    if constexpr (S::kQueryInStage) {
      if (tile.tile_begin() == block_.keys.begin) {
        copy_tile<Element<T::kQuery>::kBytes, T::kHeadDimQk, S::kRows, T::kThreads>(
            to + S::kStageQuery, p_.tensors.head_dim_qk, p_.tensors.vectorized, thread_,
            [&](int row) {
              return row < block_.rows.num_rows
                         ? query_row<T::kQuery>(p_, block_.rows, tile.kv_head(), row)
                         : nullptr;
            });
      }
    }
    if (copies_16_bytes_) return true;
    const uint32_t table = table_address(entry);
    const bool vectorized = p_.tensors.vectorized;
    if constexpr (T::kTakesKeyTails) {
      copy_any_keys(p_, context_, to, table, tile.tile_begin(), thread_);
    } else {
      KeyCopy::copy_any(to, table, p_.tensors.head_dim_qk, vectorized, thread_);
    }
    ValueCopy::copy_any(to + S::kValue, table + KvRow::kValueOffset, p_.tensors.head_dim_vo,
                        vectorized, thread_);
    return false;
  }

  /// Copies the keys of the tile that begins at `tile_begin`, whether or not their last dims are in
  /// another tensor.
  static __device__ __noinline__ void copy_any_keys(const AttentionParams& p,
                                                    const TileContext& context, uint32_t to,
                                                    uint32_t table, int32_t tile_begin,
                                                    int thread) {
    if (has_key_tail(p)) {
      const KeySpan seen = {context.first_seen, context.block.keys.end};
      copy_key_parts<Element<T::kKv>::kBytes, T::kHeadDimQk, T::kTileKv, T::kThreads>(
          to, table, p, context.block.kv_row, seen, tile_begin, thread);
    } else {
      KeyCopy::copy_any(to, table, p.tensors.head_dim_qk, p.tensors.vectorized, thread);
    }
  }

  /// Starts this thread's copies of the keys and values of a tile. All addresses are read before
  /// the first copy, since a read of shared memory waits for earlier copies to it.
  FLASHPLAN_DEVICE void copy_keys_and_values(int entry) const {
    const int thread = opaque(thread_);
    const uint32_t table = table_address(entry);
    const uint32_t to = stage_address(stage_of(entry));
    const unsigned char* k[KeyCopy::kRowsPerThread];
    const unsigned char* v[ValueCopy::kRowsPerThread];
    if constexpr (KeyCopy::kLanesPerRow == ValueCopy::kLanesPerRow) {
#pragma unroll
      for (int i = 0; i < KeyCopy::kRowsPerThread; ++i) {
        load_shared_pointers(table + KeyCopy::row(i, thread) * KvRow::kPitch, k[i], v[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < KeyCopy::kRowsPerThread; ++i) {
        k[i] = load_shared_pointer(table + KeyCopy::row(i, thread) * KvRow::kPitch);
      }
#pragma unroll
      for (int i = 0; i < ValueCopy::kRowsPerThread; ++i) {
        v[i] = load_shared_pointer(table + ValueCopy::row(i, thread) * KvRow::kPitch +
                                   KvRow::kValueOffset);
      }
    }
#pragma unroll
    for (int i = 0; i < KeyCopy::kRowsPerThread; ++i) {
      KeyCopy::copy(to, k[i], i, thread);
    }
#pragma unroll
    for (int i = 0; i < ValueCopy::kRowsPerThread; ++i) {
      ValueCopy::copy(to + S::kValue, v[i], i, thread);
    }
  }

  const AttentionParams& p_;
  TileContext& context_;
  const RowBlock& block_;
  const uint32_t base_;
  const int thread_;
  const bool copies_16_bytes_;
  Cursor next_;   // the tile that is copied next; kept up to date after fill() only if kEachStep
  Cursor asked_;  // the tile whose page ids are requested next
  // If kFindsOwnRows: the page ids of the request, and the rows whose addresses are stored next.
  const int32_t* ids_ = nullptr;
  Finder finder_;
  typename Finder::Rows rows_;
  int entry_ = 0;
};

}  // namespace flashplan::device
