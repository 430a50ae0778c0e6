// SPDX-License-Identifier: Apache-2.0
// Attention of one work tile by one CTA: mma.sync, ldmatrix and cp.async.
#pragma once

#include "kernels/device/logits.h"
#include "kernels/device/tile_output.h"

namespace flashplan::device {

/// Attention of one work tile, by all threads of the CTA.
template <typename T, typename S>
class TileRunner {
 public:
  FLASHPLAN_DEVICE TileRunner(const AttentionParams& p, TileContext& context, unsigned char* smem)
      : p_(p),
        context_(context),
        rows_(context_.rows),
        variant_(p),
        smem_(smem),
        base_(shared_address(smem)),
        thread_(thread_index()),
        computes_(WarpPlace<S>(thread_).computes),
        copies_16_bytes_(p.vectorized && p.head_dim_qk == T::kHeadDimQk &&
                         p.head_dim_vo == T::kHeadDimVo) {}

  FLASHPLAN_DEVICE void run() {
    if (rows_.keys.begin >= rows_.keys.end) {
      write_empty<T>(p_, context_, thread_);
      return;
    }
    const KeySpan keys = rows_.keys;
    const int32_t heads_end = context_.tile.kv_head + context_.tile.num_kv_heads;
    // In the pipeline page ids come first, then the addresses of rows, then rows: cursors of the
    // tiles that are next to come.
    Cursor ids(keys, context_.tile.kv_head);
    Cursor rows(keys, context_.tile.kv_head);
    fill_pipeline(ids, rows, keys, heads_end);
    reset_queries();

    int stage = 0;
    for (int32_t head = context_.tile.kv_head; head < heads_end; ++head) {
      int32_t left = keys.end - keys.begin;
      for (int chunk = 0; left > 0; ++chunk) {
        reset();
        int32_t chunk_left = min(left, context_.chunk_kv);
        int last_stage;
        do {
          // A query buffer of its own was asked for in the latest group.
          const bool is_first = left == keys.end - keys.begin;
          if (!S::kQueryInStage && S::kStages > 2 && is_first) {
            cp_async_wait<0>();
          } else {
            cp_async_wait<S::kStages - 2>();
          }
          __syncthreads();
          const int next_stage = stage == 0 ? S::kStages - 1 : stage - 1;
          const bool copies = begin_issue(next_stage, rows, keys, heads_end);
          const auto copy = [&] {
            copy_keys_and_values(next_stage, copies);
            copy_page_ids(next_stage, ids, keys);
            cp_async_commit();
          };
          if (computes_) {
            if (S::kQueryInRegisters && is_first) load_queries(stage, head);
            attend(stage, keys.end - left, head, copy);
            if (!S::kQueryInStage && left <= T::kTileKv && head + 1 < heads_end) {
              __syncwarp();
              copy_own_queries(head + 1);
            }
          } else {
            copy();
          }
          find_rows(stage, rows, keys);
          last_stage = stage;
          stage = stage + 1 == S::kStages ? 0 : stage + 1;
          left -= T::kTileKv;
          chunk_left -= T::kTileKv;
        } while (chunk_left > 0);
        softmax_.finish();
        TileOutput<T, S>(p_, context_, smem_, thread_, last_stage, head, chunk, left <= 0)
            .write(softmax_, o_);
      }
    }
    if (context_.tile.split >= 0) merge_if_last<T, S>(p_, context_, thread_);
  }

 private:
  static constexpr int kMmaRowBytes = 16 * T::kHeadDimQk * Element<T::kQ>::kBytes;  // of queries
  using Cursor = KvCursor<T::kKv, T::kTileKv, T::kThreads>;

  /// Of a stage's keys: their row addresses and page ids.
  FLASHPLAN_DEVICE uint32_t table_address(int stage) const {
    return base_ + S::kTables + stage * S::kTableBytes;
  }
  FLASHPLAN_DEVICE uint32_t ids_address(int stage) const {
    return base_ + S::kIds + stage * S::kIdBytes;
  }
  /// Page ids of the request; null: ragged.
  FLASHPLAN_DEVICE const int32_t* request_ids() const {
    return reinterpret_cast<const int32_t*>(
        load_shared_pointer(shared_address(&context_.page_ids)));
  }
  FLASHPLAN_DEVICE void copy_page_ids(int stage, Cursor& ids, KeySpan keys) const {
    ids.copy_page_ids(ids_address(stage), p_.pages, request_ids(), keys, opaque(thread_));
    ids.advance(keys);
  }
  FLASHPLAN_DEVICE void find_rows(int stage, Cursor& rows, KeySpan keys) const {
    rows.find_rows(table_address(stage), ids_address(stage), p_, rows_.request.kv_begin, keys,
                   opaque(thread_));
    rows.advance(keys);
  }
  FLASHPLAN_DEVICE uint32_t stage_address(int stage) const {
    return base_ + S::kFirstStage + stage * S::kStageBytes;
  }
  FLASHPLAN_DEVICE uint32_t visible_address() const {
    return base_ + S::kVisible + (opaque(thread_) >> 5) * static_cast<int>(sizeof(VisibleKeys));
  }

  /// What this warp's rows see.
  FLASHPLAN_DEVICE void find_visible() const {
    const int first = WarpPlace<S>(thread_).first_row();
    const int last = min(first + S::kMmaM * 16, rows_.num_rows) - 1;
    const VisibleKeys visible(p_, rows_, first, max(first, last));  // none if there are no rows
    if (thread_ % 32 == 0) {
      store_shared_16(visible_address(), __builtin_bit_cast(uint4, visible));
    }
  }

  /// Has on its way what the end of a split tile needs, to the context and to the L2 cache.
  FLASHPLAN_DEVICE void prepare_split() const {
    constexpr int kWords = sizeof(SplitTile) / 8;
    if (thread_ < kWords) {
      const auto* split = reinterpret_cast<const unsigned char*>(p_.splits + context_.tile.split);
      cp_async_8(shared_address(&context_.split) + thread_ * 8, split + thread_ * 8);
    } else if (thread_ == kWords) {
      prefetch_l2(p_.arrivals + context_.tile.split);
    } else if (thread_ == kWords + 1) {
      prefetch_l2(p_.partial_lse + int64_t{context_.tile.partial_slot} * T::kTileQ);
    }
  }

  FLASHPLAN_DEVICE void fill_pipeline(Cursor& ids, Cursor& rows, KeySpan keys, int32_t heads_end) {
#pragma unroll 1
    for (int i = 0; i < S::kStages; ++i) copy_page_ids(i, ids, keys);
    if (context_.tile.split >= 0) prepare_split();
    cp_async_commit();
    find_visible();
    cp_async_wait<0>();
    __syncthreads();
    Cursor issued = rows;
#pragma unroll 1
    for (int i = 0; i < S::kStages; ++i) find_rows(i, rows, keys);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < S::kStages - 1; ++i) {
      issued.advance(keys);
      const bool copies = begin_issue(i, issued, keys, heads_end);
      copy_keys_and_values(i, copies);
      copy_page_ids(i, ids, keys);
      cp_async_commit();
    }
    if (!S::kQueryInStage && computes_) copy_own_queries(context_.tile.kv_head);
  }

  using KeyCopy = TileCopy<Element<T::kKv>::kBytes, T::kHeadDimQk, T::kTileKv, T::kThreads>;
  using ValueCopy = TileCopy<Element<T::kKv>::kBytes, T::kHeadDimVo, T::kTileKv, T::kThreads>;

  /// Starts to bring the tile before `cursor` to a stage: the queries with the first of a head, and
  /// rows of uncommon form. True if copy_keys_and_values() has the rest to do.
  FLASHPLAN_DEVICE bool begin_issue(int stage, const Cursor& cursor, KeySpan keys,
                                    int32_t heads_end) {
    const bool is_last_of_head = cursor.tile_begin() == keys.begin;
    const int head = cursor.kv_head() - (is_last_of_head ? 1 : 0);
    if (head >= heads_end) return false;
    const uint32_t to = stage_address(stage);
    if constexpr (S::kQueryInStage) {
      const bool is_first_of_head = is_last_of_head
                                        ? keys.end - keys.begin <= T::kTileKv
                                        : cursor.tile_begin() - keys.begin == T::kTileKv;
      if (is_first_of_head) {
        copy_tile<Element<T::kQ>::kBytes, T::kHeadDimQk, S::kRows, T::kThreads>(
            to + S::kStageQuery, p_.head_dim_qk, p_.vectorized, thread_, [&](int row) {
              return row < rows_.num_rows ? query_row<T::kQ>(p_, rows_, head, row) : nullptr;
            });
      }
    }
    if (copies_16_bytes_) return true;
    const uint32_t table = table_address(stage);
    KeyCopy::copy_unaligned(to + S::kKey, table, p_.head_dim_qk, thread_);
    ValueCopy::copy_unaligned(to + S::kValue, table + KvRow::kValueOffset, p_.head_dim_vo, thread_);
    return false;
  }

  /// Starts this thread's copies of a tile of keys and values. All addresses are read first: no
  /// read of shared memory can pass a copy to it.
  FLASHPLAN_DEVICE void copy_keys_and_values(int stage, bool valid) const {
    const int thread = opaque(thread_);
    const uint32_t table = table_address(stage);
    const uint32_t to = stage_address(stage);
    const unsigned char* k[KeyCopy::kCopies];
    const unsigned char* v[ValueCopy::kCopies];
    if constexpr (T::kHeadDimQk == T::kHeadDimVo) {
#pragma unroll
      for (int i = 0; i < KeyCopy::kCopies; ++i) {
        load_shared_pointers(table + KeyCopy::row(i, thread) * KvRow::kPitch, k[i], v[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < KeyCopy::kCopies; ++i) {
        k[i] = load_shared_pointer(table + KeyCopy::row(i, thread) * KvRow::kPitch);
      }
#pragma unroll
      for (int i = 0; i < ValueCopy::kCopies; ++i) {
        v[i] = load_shared_pointer(table + ValueCopy::row(i, thread) * KvRow::kPitch +
                                   KvRow::kValueOffset);
      }
    }
#pragma unroll
    for (int i = 0; i < KeyCopy::kCopies; ++i) {
      KeyCopy::copy(to + S::kKey, k[i], i, valid, thread);
    }
#pragma unroll
    for (int i = 0; i < ValueCopy::kCopies; ++i) {
      ValueCopy::copy(to + S::kValue, v[i], i, valid, thread);
    }
  }

  /// The rows of this warp alone; past the last row it is copied again.
  FLASHPLAN_DEVICE void copy_own_queries(int head) {
    const WarpPlace<S> at(opaque(thread_));
    using Copy = TileCopy<Element<T::kQ>::kBytes, T::kHeadDimQk, S::kMmaM * 16, 32>;
    const uint32_t to = base_ + S::kQuery + at.first_row() * Copy::Tile::kRowBytes;
    // Lane r finds row r; others ask it.
    const int own_row = min(at.first_row() + at.lane % (S::kMmaM * 16), rows_.num_rows - 1);
    const unsigned char* own = query_row<T::kQ>(p_, rows_, head, own_row);
    if (copies_16_bytes_) {
#pragma unroll 4
      for (int i = 0; i < Copy::kCopies; ++i) {
        Copy::copy(to, shuffled_pointer(own, Copy::row(i, at.lane)), i, true, at.lane);
      }
    } else {
      copy_tile<Element<T::kQ>::kBytes, T::kHeadDimQk, S::kMmaM * 16, 32>(
          to, p_.head_dim_qk, p_.vectorized, at.lane,
          [&](int row) { return shuffled_pointer(own, row); });
    }
    cp_async_commit();
  }

  /// Of this lane's part of the warp's queries.
  FLASHPLAN_DEVICE uint32_t own_query_address(int stage) const {
    const WarpPlace<S> at(opaque(thread_));
    const uint32_t q_tile =
        S::kQueryInStage ? stage_address(stage) + S::kStageQuery : base_ + S::kQuery;
    return query_address<T::kQ, T::kKv, T::kHeadDimQk>(q_tile, at.first_row(), at.lane);
  }

  /// The fragment `k` of rows 16 * m on, from own_query_address().
  FLASHPLAN_DEVICE void load_query(uint32_t (&a)[4], uint32_t address, int m, int k, int head) {
    load_query_fragment<T::kQ, T::kKv, T::kHeadDimQk>(a, address + m * kMmaRowBytes, k);
    if constexpr (T::Variant::kTransformsQuery) {
      const WarpPlace<S> place(opaque(thread_));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int dim = query_fragment_dim<T::kKv>(k, i, place.lane);
        if (dim >= p_.head_dim_qk) continue;  // zeros stay zeros
        const ElementPosition at = rows_.position(p_, head, place.row(m, i % 2), dim);
        const float2 x = Element<T::kQ>::unpack(a[i]);
        a[i] = Element<T::kQ>::pack(variant_.query(x.x, at), variant_.query(x.y, at.next(1)));
      }
    }
  }

  FLASHPLAN_DEVICE void load_queries(int stage, int head) {
    const uint32_t address = own_query_address(stage);
#pragma unroll
    for (int k = 0; k < T::kHeadDimQk / 16; ++k) {
#pragma unroll
      for (int m = 0; m < S::kMmaM; ++m) {
        load_query(query_[k][m], address, m, k, head);
      }
    }
  }

  /// Gives registers a value: otherwise the compiler sees those of a tile in use before it, and
  /// spills them to make room for other shapes.
  FLASHPLAN_DEVICE void reset_queries() {
    for (auto& fragments : query_) {
      for (auto& fragment : fragments) {
        for (uint32_t& pair : fragment) pair = 0;
      }
    }
  }

  FLASHPLAN_DEVICE void reset() {
    softmax_.reset();
#pragma unroll
    for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
      for (int n = 0; n < T::kHeadDimVo / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o_[m][n][j] = 0.0F;
      }
    }
  }

  /// One tile of keys, of which this warp takes kKeysPerWarp. `copy` starts copies to another
  /// stage.
  template <typename Copy>
  FLASHPLAN_DEVICE void attend(int stage, int32_t first_key, int head, Copy copy) {
    constexpr int kParts = S::kKeysPerWarp / S::kKeysAtOnce;
    const uint32_t from = stage_address(stage);
    const int warp_key = WarpPlace<S>(opaque(thread_)).warp_kv * S::kKeysPerWarp;
    // Counted from the first key of the tile.
    VisibleKeys visible = __builtin_bit_cast(VisibleKeys, load_shared_16(visible_address()));
    visible.to_any = {visible.to_any.begin - first_key, visible.to_any.end - first_key};
    visible.to_all = {visible.to_all.begin - first_key, visible.to_all.end - first_key};
    if (visible.to_any.begin >= warp_key + S::kKeysPerWarp || visible.to_any.end <= warp_key) {
      copy();
      return;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int key = warp_key + part * S::kKeysAtOnce;
      if (part > 0 && visible.to_any.end <= key) return;
      const uint32_t address = own_query_address(stage);
      Logits<S> s = {};
      multiply_keys<T::kQ, T::kKv, T::kHeadDimQk, S::kMmaM, S::kKeysAtOnce>(
          s.tiles, from + S::kKey, key, opaque(thread_) & 31,
          [&](uint32_t (&a)[4], int m, int k) {
            if constexpr (S::kQueryInRegisters) {
#pragma unroll
              for (int i = 0; i < 4; ++i) a[i] = query_[k][m][i];
            } else {
              load_query(a, address, m, k, head);
            }
          },
          [&] {
            if (part == 0) copy();
          },
          [&](uint32_t pair, int key_of_tile, int dim) {
            if constexpr (!T::Variant::kTransformsKey) return pair;
            if (dim >= p_.head_dim_qk) return pair;  // zeros stay zeros
            const ElementPosition at = {rows_.request_index, first_key + key_of_tile, head, dim};
            const float2 x = Element<T::kQ>::unpack(pair);
            return Element<T::kQ>::pack(variant_.key(x.x, at), variant_.key(x.y, at.next(1)));
          });
      s.template transform<typename T::Variant>(p_, rows_, variant_, thread_, first_key + key,
                                                head);
      if (visible.to_all.begin > key || visible.to_all.end < key + S::kKeysAtOnce) {
        asm volatile("");  // a branch, not selections for every tile
        s.mask(p_, rows_, thread_, first_key, key);
      }
      if constexpr (T::Variant::kUseSoftmax) {
        softmax_.update(s.tiles, o_, variant_.exp2_scale);
      } else {
        s.drop_masked();
      }
      multiply_values<T::kQ, T::kKv, T::kHeadDimVo, S::kMmaM, S::kKeysAtOnce>(
          o_, s.tiles, from + S::kValue, key, opaque(thread_) & 31,
          [&](uint32_t pair, int key_of_tile, int dim) {
            if constexpr (!T::Variant::kTransformsValue) return pair;
            const int token = first_key + key_of_tile;
            const float2 x = Element<T::kQ>::unpack(pair);
            return Element<T::kQ>::pack(
                variant_.value(x.x, {rows_.request_index, token, head, dim}),
                variant_.value(x.y, {rows_.request_index, token + 1, head, dim}));
          });
    }
  }

  const AttentionParams& p_;
  TileContext& context_;
  const RowBlock& rows_;
  const typename T::Variant variant_;
  unsigned char* const smem_;
  const uint32_t base_;
  const int thread_;
  const bool computes_;         // not in a warp without keys
  const bool copies_16_bytes_;  // all of k and v

  OnlineSoftmax<S::kMmaM> softmax_;
  float o_[S::kMmaM][T::kHeadDimVo / 8][4];
  uint32_t query_[S::kQueryInRegisters ? T::kHeadDimQk / 16 : 1][S::kMmaM][4];
};

}  // namespace flashplan::device
