// SPDX-License-Identifier: Apache-2.0
// Attention of one work tile by one CTA: mma.sync, ldmatrix and cp.async.
#pragma once

#include "kernels/device/merge_partials.h"
#include "kernels/device/shape.h"
#include "kernels/device/softmax.h"
#include "kernels/device/warp_mma.h"

namespace flashplan::device {

/// A work tile as all threads see it, in shared memory: registers are for accumulators.
struct TileContext {
  WorkTile tile;
  RowBlock rows;
  const int32_t* page_ids;  // of the request; null: ragged
  KeySpan seen_by_all;      // keys that need no mask
  int32_t chunk_kv;         // keys of a state; no fewer than there are: one state
  int32_t is_last;          // whether this CTA is the last of a split to arrive

  FLASHPLAN_DEVICE void assign(const AttentionParams& p, const WorkTile& work_tile,
                               const RequestInfo& request) {
    tile = work_tile;
    rows.assign(p, work_tile, request);
    page_ids = device::page_ids(p.pages, work_tile.request);
    seen_by_all = rows.visible_to_all();
    chunk_kv = p.chunk_kv > 0 ? p.chunk_kv : 0x7fffffff;
  }
};

static_assert(sizeof(TileContext) <= 128);

/// Attention of one work tile, by all threads of the CTA.
template <typename T, typename S>
class TileRunner {
 public:
  FLASHPLAN_DEVICE TileRunner(const AttentionParams& p, unsigned char* smem)
      : p_(p),
        context_(*reinterpret_cast<TileContext*>(smem)),
        rows_(context_.rows),
        variant_(p),
        smem_(smem),
        base_(shared_address(smem)),
        thread_(thread_index()),
        lane_(thread_ & 31),
        warp_q_((thread_ >> 5) % S::kWarpsQ),
        warp_kv_((thread_ >> 5) / S::kWarpsQ),
        computes_(S::kWarpsQ * S::kWarpsKv == S::kWarps || warp_kv_ < S::kWarpsKv),
        finds_keys_(T::kThreads == Cursor::kThreads || thread_ < Cursor::kThreads),
        copies_16_bytes_(p.vectorized && p.head_dim_qk == T::kHeadDimQk &&
                         p.head_dim_vo == T::kHeadDimVo) {}

  FLASHPLAN_DEVICE void run() {
    if (rows_.keys.begin >= rows_.keys.end) {
      write_empty();
      return;
    }
    begin();
    const KeySpan keys = rows_.keys;
    const int32_t heads_end = context_.tile.kv_head + context_.tile.num_kv_heads;
    Cursor cursor(keys, context_.tile.kv_head);  // of the tile whose rows are found next
    fill_pipeline(cursor, keys, heads_end);

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
          const bool copies = begin_issue(next_stage, cursor, keys, heads_end);
          if (finds_keys_) cursor.look_up(p_.pages, request_ids(), keys, thread_);

          const auto copy = [&] {
            copy_keys_and_values(next_stage, copies);
            cp_async_commit();
          };
          if (computes_) {
            if (S::kQueryInRegisters && is_first) load_queries(stage);
            attend(stage, keys.end - left, head, left <= T::kTileKv && head + 1 < heads_end, copy);
          } else {
            copy();
          }

          if (finds_keys_) publish(stage, cursor, keys);
          cursor.advance(keys);
          last_stage = stage;
          stage = stage + 1 == S::kStages ? 0 : stage + 1;
          left -= T::kTileKv;
          chunk_left -= T::kTileKv;
        } while (chunk_left > 0);
        finish_chunk(last_stage, head, chunk, left <= 0);
      }
    }
    if (context_.tile.split >= 0) merge_if_last();
  }

 private:
  using Cursor = KvCursor<T::kKv, T::kTileKv>;

  /// The row addresses of a stage's keys.
  FLASHPLAN_DEVICE uint32_t table_address(int stage) const {
    return base_ + S::kTables + stage * S::kTableBytes;
  }
  FLASHPLAN_DEVICE void publish(int stage, const Cursor& cursor, KeySpan keys) const {
    store_shared_pointer(table_address(stage) + Cursor::table_offset(thread_),
                         cursor.row(p_, rows_.request.kv_begin, keys, thread_));
  }
  /// Page ids of the request; null: ragged.
  FLASHPLAN_DEVICE const int32_t* request_ids() const {
    return reinterpret_cast<const int32_t*>(
        load_shared_pointer(base_ + static_cast<int>(__builtin_offsetof(TileContext, page_ids))));
  }
  FLASHPLAN_DEVICE uint32_t stage_address(int stage) const {
    return base_ + S::kFirstStage + stage * S::kStageBytes;
  }
  FLASHPLAN_DEVICE int first_row() const { return warp_q_ * S::kMmaM * 16; }
  FLASHPLAN_DEVICE int row(int m, int half) const {
    return first_row() + m * 16 + half * 8 + lane_ / 4;
  }

  FLASHPLAN_DEVICE void fill_pipeline(Cursor& cursor, KeySpan keys, int32_t heads_end) {
    if (!S::kQueryInStage && computes_) copy_own_queries(context_.tile.kv_head);
    Cursor issued = cursor;
    // All ids first: one wait for memory, not one per stage.
    Cursor cursors[S::kStages];
#pragma unroll
    for (int i = 0; i < S::kStages; ++i) {
      cursors[i] = cursor;
      if (finds_keys_) cursors[i].look_up(p_.pages, request_ids(), keys, thread_);
      cursor.advance(keys);
    }
#pragma unroll
    for (int i = 0; i < S::kStages; ++i) {
      if (finds_keys_) publish(i, cursors[i], keys);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < S::kStages - 1; ++i) {
      issued.advance(keys);
      const bool copies = begin_issue(i, issued, keys, heads_end);
      copy_keys_and_values(i, copies);
      cp_async_commit();
    }
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
            to + S::kStageQuery, p_.head_dim_qk, p_.vectorized, thread_,
            [&](int row) { return query_row<T::kQ>(p_, rows_, head, row); });
      }
    }
    if (copies_16_bytes_) return true;
    const uint32_t table = table_address(stage);
    KeyCopy::copy_unaligned(to + S::kKey, table, p_.head_dim_qk, thread_);
    ValueCopy::copy_unaligned(to + S::kValue, table + static_cast<int>(sizeof(KvRow)) / 2,
                              p_.head_dim_vo, thread_);
    return false;
  }

  /// Starts this thread's copies of a tile of keys and values. All addresses are read first: no
  /// read of shared memory can pass a copy to it.
  FLASHPLAN_DEVICE void copy_keys_and_values(int stage, bool valid) const {
    constexpr int kPitch = static_cast<int>(sizeof(KvRow));
    const uint32_t table = table_address(stage);
    const uint32_t to = stage_address(stage);
    const unsigned char* k[KeyCopy::kCopies];
    const unsigned char* v[ValueCopy::kCopies];
    if constexpr (T::kHeadDimQk == T::kHeadDimVo) {
#pragma unroll
      for (int i = 0; i < KeyCopy::kCopies; ++i) {
        load_shared_pointers(table + KeyCopy::row(i, thread_) * kPitch, k[i], v[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < KeyCopy::kCopies; ++i) {
        k[i] = load_shared_pointer(table + KeyCopy::row(i, thread_) * kPitch);
      }
#pragma unroll
      for (int i = 0; i < ValueCopy::kCopies; ++i) {
        v[i] = load_shared_pointer(table + ValueCopy::row(i, thread_) * kPitch + kPitch / 2);
      }
    }
#pragma unroll
    for (int i = 0; i < KeyCopy::kCopies; ++i) {
      KeyCopy::copy(to + S::kKey, k[i], i, valid, thread_);
    }
#pragma unroll
    for (int i = 0; i < ValueCopy::kCopies; ++i) {
      ValueCopy::copy(to + S::kValue, v[i], i, valid, thread_);
    }
  }

  /// The rows of this warp alone.
  FLASHPLAN_DEVICE void copy_own_queries(int head) {
    constexpr int kRowBytes = T::kHeadDimQk * Element<T::kQ>::kBytes;
    // Lane r finds row r; others ask it.
    const unsigned char* own =
        query_row<T::kQ>(p_, rows_, head, first_row() + lane_ % (S::kMmaM * 16));
    copy_tile<Element<T::kQ>::kBytes, T::kHeadDimQk, S::kMmaM * 16, 32>(
        base_ + S::kQuery + first_row() * kRowBytes, p_.head_dim_qk, p_.vectorized, lane_,
        [&](int row) { return shuffled_pointer(own, row); });
    cp_async_commit();
  }

  /// Of this lane's part of the warp's queries.
  FLASHPLAN_DEVICE uint32_t own_query_address(int stage) const {
    const uint32_t q_tile =
        S::kQueryInStage ? stage_address(stage) + S::kStageQuery : base_ + S::kQuery;
    return query_address<T::kQ, T::kKv, T::kHeadDimQk>(q_tile, first_row(), lane_);
  }

  FLASHPLAN_DEVICE void load_queries(int stage) {
    const uint32_t address = own_query_address(stage);
#pragma unroll
    for (int k = 0; k < T::kHeadDimQk / 16; ++k) {
      load_query_fragment<T::kQ, T::kKv, T::kHeadDimQk>(query_[k], address, k);
    }
  }

  /// Gives all registers a value: otherwise the compiler sees those of a tile in use before it, and
  /// spills them to make room for other shapes.
  FLASHPLAN_DEVICE void begin() {
    reset();
    for (auto& fragment : query_) {
      for (uint32_t& pair : fragment) pair = 0;
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

  struct Logits {
    float tiles[S::kMmaM][S::kKeysAtOnce / 8][4];
  };

  /// One tile of keys, of which this warp takes kKeysPerWarp. `copy` starts copies to another
  /// stage.
  template <typename Copy>
  FLASHPLAN_DEVICE void attend(int stage, int32_t first_key, int head, bool wants_next_queries,
                               Copy copy) {
    constexpr int kParts = S::kKeysPerWarp / S::kKeysAtOnce;
    const uint32_t from = stage_address(stage);
    const int warp_key = warp_kv_ * S::kKeysPerWarp;
    const uint32_t address = own_query_address(stage);
    const KeySpan seen_by_all = context_.seen_by_all;
    const bool is_masked =
        first_key < seen_by_all.begin || seen_by_all.end - first_key < T::kTileKv;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int key = warp_key + part * S::kKeysAtOnce;
      Logits s = {};
      multiply_keys<T::kQ, T::kKv, T::kHeadDimQk, S::kMmaM, S::kKeysAtOnce>(
          s.tiles, from + S::kKey, key, lane_,
          [&](uint32_t (&a)[4], int m, int k) {
            if constexpr (S::kQueryInRegisters) {
#pragma unroll
              for (int i = 0; i < 4; ++i) a[i] = query_[k][i];
            } else {
              constexpr int kRowBytes = T::kHeadDimQk * Element<T::kQ>::kBytes;
              load_query_fragment<T::kQ, T::kKv, T::kHeadDimQk>(a, address + m * 16 * kRowBytes, k);
            }
          },
          [&] {
            if (part == 0) copy();
          });
      if (part + 1 == kParts) {
        if (!S::kQueryInStage && wants_next_queries) {
          __syncwarp();
          copy_own_queries(head + 1);
        }
      }
      transform(s, first_key + key, head);
      if (is_masked) {
        asm volatile("");  // a branch, not selections for every tile
        mask(s, first_key + key);
      }
      if constexpr (T::Variant::kUseSoftmax) {
        softmax_.update(s.tiles, o_, variant_.exp2_scale);
      } else {
        drop_masked(s);
      }
      multiply_values<T::kQ, T::kKv, T::kHeadDimVo, S::kMmaM, S::kKeysAtOnce>(
          o_, s.tiles, from + S::kValue, key, lane_);
    }
  }

  /// The variant's part in the logits.
  FLASHPLAN_DEVICE void transform(Logits& s, int32_t begin, int head) {
    using Variant = typename T::Variant;
    if constexpr (Variant::kTransformsLogits || Variant::kMasksLogits) {
#pragma unroll
      for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row(m, half);
          LogitPosition at = {rows_.request_index, rows_.query(r), 0,
                              head * rows_.group_size + rows_.head_in_group(r), head};
#pragma unroll
          for (int n = 0; n < S::kKeysAtOnce / 8; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& x = s.tiles[m][n][2 * half + j];
              at.key = begin + n * 8 + lane_ % 4 * 2 + j;
              if constexpr (Variant::kTransformsLogits) x = variant_.logit(x, at);
              if constexpr (Variant::kMasksLogits) x = variant_.visible(at) ? x : -infinity();
            }
          }
        }
      }
    }
  }

  FLASHPLAN_DEVICE void mask(Logits& s, int32_t begin) const {
#pragma unroll
    for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeySpan span = rows_.visible(row(m, half));
        const int32_t first = span.begin - begin - lane_ % 4 * 2;
        const int32_t end = span.end - begin - lane_ % 4 * 2;
#pragma unroll
        for (int n = 0; n < S::kKeysAtOnce / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = s.tiles[m][n][2 * half + j];
            x = n * 8 + j >= first && n * 8 + j < end ? x : -infinity();
          }
        }
      }
    }
  }

  FLASHPLAN_DEVICE void drop_masked(Logits& s) const {
#pragma unroll
    for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
      for (int n = 0; n < S::kKeysAtOnce / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          s.tiles[m][n][j] = s.tiles[m][n][j] == -infinity() ? 0.0F : s.tiles[m][n][j];
      }
    }
  }

  /// Adds up what the warps found in their keys; the result is warp_kv 0's. `stage` is free.
  FLASHPLAN_DEVICE void merge_warps(int stage) {
    static_assert(S::kMmaM == 1);
    float2* stats = reinterpret_cast<float2*>(smem_ + S::kStats);
    float* memory = stage_memory(stage);
    constexpr int kFloats = S::kFloatsPerWarp;
    if (computes_) {
      softmax_.finish();
      if (lane_ % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          stats[warp_kv_ * S::kRows + row(0, half)] = {softmax_.max[0][half],
                                                       softmax_.sum[0][half]};
        }
      }
    }
    __syncthreads();
    if (computes_ && T::Variant::kUseSoftmax) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float max = -infinity();
#pragma unroll
        for (int w = 0; w < S::kWarpsKv; ++w)
          max = fmaxf(max, stats[w * S::kRows + row(0, half)].x);
        const float shift = shift_of(max);
        float sum = 0.0F;
#pragma unroll
        for (int w = 0; w < S::kWarpsKv; ++w) {
          const float2 other = stats[w * S::kRows + row(0, half)];
          sum += other.y * exp2_fast((other.x - shift) * variant_.exp2_scale);
        }
        const float shrink = exp2_fast((softmax_.max[0][half] - shift) * variant_.exp2_scale);
#pragma unroll
        for (int n = 0; n < T::kHeadDimVo / 8; ++n) {
          o_[0][n][2 * half] *= shrink;
          o_[0][n][2 * half + 1] *= shrink;
        }
        softmax_.max[0][half] = max;
        softmax_.sum[0][half] = sum;
      }
    }
#pragma unroll
    for (int half = S::kWarpsKv / 2; half > 0; half /= 2) {
      if (computes_ && warp_kv_ >= half && warp_kv_ < 2 * half) {
        float* to = memory + ((warp_kv_ - half) * S::kWarpsQ + warp_q_) * kFloats + lane_;
#pragma unroll
        for (int i = 0; i < kFloats / 32; ++i) to[i * 32] = o_[0][i / 4][i % 4];
      }
      __syncthreads();
      if (computes_ && warp_kv_ < half) {
        const float* from = memory + (warp_kv_ * S::kWarpsQ + warp_q_) * kFloats + lane_;
#pragma unroll
        for (int i = 0; i < kFloats / 32; ++i) o_[0][i / 4][i % 4] += from[i * 32];
      }
      if (half > 1) __syncthreads();
    }
    __syncwarp();  // the lanes have read what share_rows() writes over
  }

  /// Ends the state of a chunk of keys, which is all of them unless results must not depend on
  /// neighbours: chunk states are then formed on their own, and merged left to right. `stage` is
  /// the last one that was read.
  FLASHPLAN_DEVICE void finish_chunk(int stage, int head, int chunk, bool is_last) {
    __syncthreads();  // all warps have read it
    if constexpr (S::kWarpsKv > 1) {
      merge_warps(stage);
    } else {
      softmax_.finish();
    }
    if (!computes_ || warp_kv_ != 0) return;
    float* memory = stage_memory(stage) + warp_q_ * S::kFloatsPerWarp;
#pragma unroll
    for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = first_row() + m * 16 + half * 8;
        if (first >= rows_.num_rows) break;
        share_rows(m, half, memory);
        __syncwarp();
        write_rows(first, head, chunk, is_last, memory);
        __syncwarp();
      }
    }
  }

  FLASHPLAN_DEVICE float* stage_memory(int stage) const {
    return reinterpret_cast<float*>(smem_ + S::kFirstStage + stage * S::kStageBytes);
  }
  FLASHPLAN_DEVICE float* shared_lse() const {
    return reinterpret_cast<float*>(smem_ + S::kRowLse) + warp_q_ * 8;
  }
  /// Of 4 dims from `dim` of row `r` of 8: rows are permuted as in SharedTile, so that the pairs
  /// that four rows write at once lie in different banks.
  static FLASHPLAN_DEVICE int shared_index(int r, int dim) {
    return r * T::kHeadDimVo + ((dim / 4 ^ r * 2) & 7) * 4 + dim / 32 * 32 + dim % 4;
  }

  /// Gives all lanes of the warp the states (o, lse) of 8 rows.
  FLASHPLAN_DEVICE void share_rows(int m, int half, float* memory) {
    constexpr bool kUseSoftmax = T::Variant::kUseSoftmax;
    const float sum = softmax_.sum[m][half];
    const float scale = !kUseSoftmax ? 1.0F : sum > 0.0F ? 1.0F / sum : 0.0F;
    const float lse = sum > 0.0F
                          ? (softmax_.max[m][half] * variant_.exp2_scale + log2_fast(sum)) * kLn2
                          : -infinity();
    if (lane_ % 4 == 0) shared_lse()[lane_ / 4] = lse;
    ValueLayout<T::kKv>::for_each_pair(o_[m], half, lane_, [&](int dim, float x, float y) {
      *reinterpret_cast<float2*>(memory + shared_index(lane_ / 4, dim)) = {x * scale, y * scale};
    });
  }

  /// Writes up to 8 shared rows from `first` on: as partial results, to the states merged so far,
  /// or as the result.
  FLASHPLAN_DEVICE void write_rows(int first, int head, int chunk, bool is_last,
                                   const float* memory) {
    constexpr int kQuads = T::kHeadDimVo / 4;
    const int num_rows = min(8, rows_.num_rows - first);
    // Lane r finds the place of row r; others ask it.
    const int own_row = first + min(lane_ & 7, num_rows - 1);
    const OutputRow own(p_, rows_, head, own_row);
    const bool is_split = context_.tile.split >= 0;
    const int64_t slot_row =
        int64_t{context_.tile.partial_slot + chunk} * p_.tile_q + first;  // if split
    if (lane_ < num_rows) {
      const float lse = shared_lse()[lane_];
      if (is_split) {
        p_.partial_lse[slot_row + lane_] = lse;
      } else if (p_.chunk_kv == 0 && p_.lse != nullptr) {
        p_.lse[own.lse] = lse;
      }
    }
#pragma unroll 4
    for (int i = lane_; i < 8 * kQuads; i += 32) {
      const int r = i / kQuads;
      const int dim = i % kQuads * 4;
      const int64_t to = __shfl_sync(0xffffffffU, own.o, r);
      if (r >= num_rows) continue;
      float4 o = *reinterpret_cast<const float4*>(memory + shared_index(r, dim));
      if (is_split) {
        *reinterpret_cast<float4*>(p_.partial_o + (slot_row + r) * T::kHeadDimVo + dim) = o;
      } else if (p_.chunk_kv > 0) {
        merge_chunk(o, first + r, dim, head, chunk, is_last);
      } else {
        store_result<T>(p_, variant_, rows_, head, first + r, to, dim, o);
      }
    }
  }

  /// Merges 4 dims of a chunk's state into those of the chunks before it, and writes the last.
  FLASHPLAN_DEVICE void merge_chunk(float4 o, int row, int dim, int head, int chunk, bool is_last) {
    // The same lane has the same dims of every chunk's state.
    const int quad = row * (T::kHeadDimVo / 4) + dim / 4;
    float4* merged_o = scratch<float4>() + quad;
    MergedRow* merged_row = scratch<MergedRow>(T::kTileQ * T::kHeadDimVo * 4) + quad;
    MergedRow merged;
    merged.reset();
    float4 so_far = {0.0F, 0.0F, 0.0F, 0.0F};
    if (chunk > 0) {
      merged = *merged_row;
      so_far = *merged_o;
    }
    const float lse = shared_lse()[row % 8];
    o = merge_values(so_far, o, T::Variant::kUseSoftmax ? merged.add(lse) : kSum);
    if (!is_last) {
      *merged_o = o;
      *merged_row = merged;
      return;
    }
    write_result<T>(p_, variant_, rows_, head, row, dim,
                    scaled(o, T::Variant::kUseSoftmax ? merged.inverse() : 1.0F), merged.lse());
  }

  /// This CTA's part of the scratch memory, from `offset` bytes on.
  template <typename U>
  FLASHPLAN_DEVICE U* scratch(int offset = 0) const {
    return reinterpret_cast<U*>(static_cast<unsigned char*>(p_.scratch) +
                                blockIdx.x * p_.scratch_bytes + offset);
  }

  FLASHPLAN_DEVICE void merge_if_last() {
    __syncthreads();  // this CTA's partial results are written
    const SplitTile split = p_.splits[context_.tile.split];
    if (thread_ == 0) {
      __threadfence();
      int32_t* arrivals = p_.arrivals + context_.tile.split;
      const bool is_last = arrive(arrivals) + 1 == split.num_pieces;
      context_.is_last = is_last;
      if (is_last) *arrivals = 0;  // for the next run
      __threadfence();
    }
    __syncthreads();
    if (context_.is_last) {
      if constexpr (S::kRows <= 16) {
        merge_partials<T, 1, 8>(p_, rows_, split);  // few rows, and maybe many states
      } else {
        merge_partials<T, 4, 2>(p_, rows_, split);
      }
    }
  }

  /// Rows that see no key.
  FLASHPLAN_DEVICE void write_empty() const {
    constexpr int kQuads = T::kHeadDimVo / 4;
    for (int h = 0; h < context_.tile.num_kv_heads; ++h) {
      for (int i = thread_; i < rows_.num_rows * kQuads; i += T::kThreads) {
        write_result<T>(p_, variant_, rows_, context_.tile.kv_head + h, i / kQuads, i % kQuads * 4,
                        {0.0F, 0.0F, 0.0F, 0.0F}, -infinity());
      }
    }
  }

  const AttentionParams& p_;
  TileContext& context_;
  const RowBlock& rows_;
  const typename T::Variant variant_;
  unsigned char* const smem_;
  const uint32_t base_;
  const int thread_;
  const int lane_;
  const int warp_q_;
  const int warp_kv_;
  const bool computes_;
  const bool finds_keys_;
  const bool copies_16_bytes_;  // all of k and v

  OnlineSoftmax<S::kMmaM> softmax_;
  float o_[S::kMmaM][T::kHeadDimVo / 8][4];
  uint32_t query_[S::kQueryInRegisters ? T::kHeadDimQk / 16 : 1][4];
};

}  // namespace flashplan::device
