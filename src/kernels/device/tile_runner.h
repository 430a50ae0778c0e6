// SPDX-License-Identifier: Apache-2.0
// Attention of one work tile by one CTA: mma.sync, ldmatrix and cp.async.
#pragma once

#include "kernels/device/logits.h"
#include "kernels/device/row_peers.h"
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
    // The tiles to be copied next, and whose page ids are to be asked for next.
    Cursor next(rows_.keys.begin, context_.tile.kv_head);
    Cursor asked = next;
    fill_pipeline(next, asked);
    reset_queries();
    const KeySpan keys = rows_.keys;
    const KeySpan& rarely_read = kEachStep ? keys : rows_.keys;
    int slot = 0;
    for (int32_t head = context_.tile.kv_head; head < heads_end(); ++head) {
      int32_t left = keys.end - keys.begin;
      for (int chunk = 0; left > 0; ++chunk) {
        reset();
        const int32_t left_after = left - min(left, context_.chunk_kv);
        do {
          const bool is_first = left == keys.end - keys.begin;
          // A query buffer of its own was asked for in the latest group.
          if (!S::kQueryInStage && S::kStages > 2 && is_first) {
            cp_async_wait<0>();
          } else {
            cp_async_wait<S::kStages - 2>();
          }
          __syncthreads();
          const Cursor tile(keys.end - left, head);
          const int next_slot = later(slot, S::kStages - 1);
          const bool copies = begin_issue(
              next_slot, kEachStep ? next : tile.template later<S::kStages - 1>(keys), head);
          const auto copy = [&] {
            if (copies) copy_keys_and_values(next_slot);
            copy_page_ids(later(slot, 2 * S::kStages - 1), rarely_read, [&] {
              return kEachStep ? asked : tile.template later<2 * S::kStages - 1>(rarely_read);
            });
            cp_async_commit();
          };
          if (computes_) {
            if (S::kQueryInRegisters && is_first) load_queries(stage_of(slot), head);
            attend(stage_of(slot), keys.end - left, head, copy);
          } else {
            copy();
          }
          if (kEachStep) {
            next = next.template later<1>(keys);
            asked = asked.template later<1>(keys);
          }
          find_rows(later(slot, S::kStages), rarely_read, [&] {
            return kEachStep ? next : tile.template later<S::kStages>(rarely_read);
          });
          slot = later(slot, 1);
          left -= T::kTileKv;
        } while (left > left_after);
        if (!S::kQueryInStage && computes_ && left <= 0 && head + 1 < heads_end()) {
          __syncwarp();  // and warps that share rows waited for each other's logits
          copy_own_queries(head + 1);
        }
        softmax_.finish(peers());
        TileOutput<T, S>(p_, context_, smem_, thread_, stage_of(later(slot, S::kSlots - 1)), head,
                         chunk, left <= 0)
            .write(softmax_, o_);
      }
    }
    if (context_.tile.split >= 0) merge_if_last<T, S>(p_, context_, thread_);
  }

 private:
  static constexpr int kMmaRowBytes = 16 * T::kHeadDimQk * Element<T::kQ>::kBytes;  // of queries
  using Cursor = KvCursor<T::kKv, T::kTileKv, T::kThreads>;
  // Whether each step finds rows. Else what that needs is computed when it is needed, to hold no
  // registers in other steps.
  static constexpr bool kEachStep = S::kTilesAtOnce == 1;

  FLASHPLAN_DEVICE int32_t heads_end() const {
    return context_.tile.kv_head + context_.tile.num_kv_heads;
  }

  // Tiles of keys take turns in kSlots slots. What is known of tile i has its place in slot i %
  // kSlots; keys and values themselves are in stage i % kStages.
  static FLASHPLAN_DEVICE int stage_of(uint32_t slot) { return slot % S::kStages; }
  static FLASHPLAN_DEVICE int later(int slot, int distance) {
    slot += distance % S::kSlots;
    return slot < S::kSlots ? slot : slot - S::kSlots;
  }
  FLASHPLAN_DEVICE uint32_t table_address(int slot) const {
    return base_ + S::kTables + slot * S::kTableBytes;
  }
  FLASHPLAN_DEVICE uint32_t ids_address(int slot) const {
    return base_ + S::kIds + slot * S::kIdBytes;
  }
  FLASHPLAN_DEVICE uint32_t stage_address(int stage) const {
    return base_ + S::kFirstStage + stage * S::kStageBytes;
  }
  /// Page ids of the request; null: ragged.
  FLASHPLAN_DEVICE const int32_t* request_ids() const {
    return reinterpret_cast<const int32_t*>(
        load_shared_pointer(shared_address(&context_.page_ids)));
  }
  /// Starts to bring page ids to a slot and those after it, of kTilesAtOnce tiles from tile() on:
  /// once for all of them.
  template <typename Tile>
  FLASHPLAN_DEVICE void copy_page_ids(int slot, const KeySpan& keys, Tile tile) const {
    if (slot % S::kTilesAtOnce != 0 || p_.pages.ids == nullptr) return;
    tile().template copy_page_ids<S::kTilesAtOnce>(ids_address(slot), p_.pages, request_ids(), keys,
                                                   opaque(thread_));
  }
  /// The same for row addresses, given the page ids.
  template <typename Tile>
  FLASHPLAN_DEVICE void find_rows(int slot, const KeySpan& keys, Tile tile) const {
    if (slot % S::kTilesAtOnce != 0) return;
    tile().template find_rows<S::kTilesAtOnce>(table_address(slot), ids_address(slot), p_,
                                               rows_.request.kv_begin, keys, opaque(thread_));
  }
  FLASHPLAN_DEVICE uint32_t visible_address() const {
    return base_ + S::kVisible + (opaque(thread_) >> 5) * static_cast<int>(sizeof(VisibleKeys));
  }

  FLASHPLAN_DEVICE RowPeers<S> peers() const { return {base_ + S::kPeers, opaque(thread_)}; }

  /// Finds what this warp's rows see.
  FLASHPLAN_DEVICE void find_visible() const {
    const int first = WarpPlace<S>(thread_).first_row();
    const int last = min(first + S::kMmaM * 16, rows_.num_rows) - 1;
    const VisibleKeys visible(p_, rows_, first, max(first, last));  // none if there are no rows
    if (thread_ % 32 == 0) {
      store_shared_16(visible_address(), __builtin_bit_cast(uint4, visible));
    }
  }

  /// The end of the keys that any row sees.
  FLASHPLAN_DEVICE int32_t visible_end() const {
    constexpr int kOffset =
        __builtin_offsetof(VisibleKeys, to_any) + __builtin_offsetof(KeySpan, end);
    return static_cast<int32_t>(load_shared_4(visible_address() + kOffset));
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

  FLASHPLAN_DEVICE void fill_pipeline(Cursor& next, Cursor& asked) {
    const KeySpan keys = rows_.keys;
    const Cursor first = next;
#pragma unroll 1
    for (int slot = 0; slot < S::kStages; ++slot) {
      copy_page_ids(slot, keys, [&] { return asked; });
      asked = asked.template later<1>(keys);
    }
    if (context_.tile.split >= 0) prepare_split();
    cp_async_commit();
    if (p_.pages.ids != nullptr) {
      cp_async_wait<0>();
      __syncthreads();
    }
#pragma unroll 1
    for (int slot = 0; slot < S::kStages; ++slot) {
      find_rows(slot, keys, [&] { return next; });
      next = next.template later<1>(keys);
    }
    __syncthreads();
    next = first;
#pragma unroll 1
    for (int slot = 0; slot < S::kStages - 1; ++slot) {
      if (begin_issue(slot, next, first.kv_head())) copy_keys_and_values(slot);
      copy_page_ids(later(slot, S::kStages), keys, [&] { return asked; });
      cp_async_commit();
      next = next.template later<1>(keys);
      asked = asked.template later<1>(keys);
    }
    if (!S::kQueryInStage && computes_) copy_own_queries(first.kv_head());
    find_visible();
  }

  using KeyCopy = TileCopy<Element<T::kKv>::kBytes, T::kHeadDimQk, T::kTileKv, T::kThreads>;
  using ValueCopy = TileCopy<Element<T::kKv>::kBytes, T::kHeadDimVo, T::kTileKv, T::kThreads>;

  /// Starts to bring a tile to its slot, if it is one of the work tile's, as those of `head` are:
  /// the queries with the first of a head, and rows of uncommon form. True if
  /// copy_keys_and_values() has the rest to do.
  FLASHPLAN_DEVICE bool begin_issue(int slot, const Cursor& tile, int32_t head) {
    if (tile.kv_head() != head && tile.kv_head() >= heads_end()) return false;
    const uint32_t to = stage_address(stage_of(slot));
    if constexpr (S::kQueryInStage) {
      if (tile.tile_begin() == rows_.keys.begin) {
        copy_tile<Element<T::kQ>::kBytes, T::kHeadDimQk, S::kRows, T::kThreads>(
            to + S::kStageQuery, p_.head_dim_qk, p_.vectorized, thread_, [&](int row) {
              return row < rows_.num_rows ? query_row<T::kQ>(p_, rows_, tile.kv_head(), row)
                                          : nullptr;
            });
      }
    }
    if (copies_16_bytes_) return true;
    const uint32_t table = table_address(slot);
    KeyCopy::copy_unaligned(to + S::kKey, table, p_.head_dim_qk, thread_);
    ValueCopy::copy_unaligned(to + S::kValue, table + KvRow::kValueOffset, p_.head_dim_vo, thread_);
    return false;
  }

  /// Starts this thread's copies of a slot's keys and values. All addresses are read first: no
  /// read of shared memory can pass a copy to it.
  FLASHPLAN_DEVICE void copy_keys_and_values(int slot) const {
    const int thread = opaque(thread_);
    const uint32_t table = table_address(slot);
    const uint32_t to = stage_address(stage_of(slot));
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
      KeyCopy::copy(to + S::kKey, k[i], i, thread);
    }
#pragma unroll
    for (int i = 0; i < ValueCopy::kRowsPerThread; ++i) {
      ValueCopy::copy(to + S::kValue, v[i], i, thread);
    }
  }

  /// The rows of this warp, half of them where two share them; past the last row it is copied
  /// again.
  FLASHPLAN_DEVICE void copy_own_queries(int head) {
    constexpr int kRows = S::kMmaM * 16 / S::kWarpsVo;
    const WarpPlace<S> at(opaque(thread_));
    using Copy = TileCopy<Element<T::kQ>::kBytes, T::kHeadDimQk, kRows, 32>;
    const int first_row = at.first_row() + at.warp_vo * kRows;
    const uint32_t to = base_ + S::kQuery + first_row * Copy::Tile::kRowBytes;
    // Lane r finds row r; others ask it.
    const int own_row = min(first_row + at.lane % kRows, rows_.num_rows - 1);
    const unsigned char* own = query_row<T::kQ>(p_, rows_, head, own_row);
    if (copies_16_bytes_) {
#pragma unroll 4
      for (int i = 0; i < Copy::kRowsPerThread; ++i) {
        Copy::copy(to, shuffled_pointer(own, Copy::row(i, at.lane)), i, at.lane);
      }
    } else {
      copy_tile<Element<T::kQ>::kBytes, T::kHeadDimQk, kRows, 32>(
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
        a[i] =
            transformed<T::kQ>(a[i], [&](float x, int j) { return variant_.query(x, at.next(j)); });
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
      for (int n = 0; n < S::kDimsVo / 8; ++n) {
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
      const int own_key = key + WarpPlace<S>(opaque(thread_)).warp_vo * S::kLogitKeys;
      const uint32_t address = own_query_address(stage);
      Logits<S> s = {};
      multiply_keys<T::kQ, T::kKv, T::kHeadDimQk, S::kMmaM, S::kLogitKeys>(
          s.tiles, from + S::kKey, own_key, opaque(thread_) & 31,
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
            return transformed<T::kQ>(pair,
                                      [&](float x, int j) { return variant_.key(x, at.next(j)); });
          });
      s.template transform<typename T::Variant>(p_, rows_, variant_, thread_, first_key + own_key,
                                                head);
      if (visible.to_all.begin > own_key || visible.to_all.end < own_key + S::kLogitKeys) {
        asm volatile("");  // a branch, not selections for every tile
        if (visible.to_all.begin > own_key) {
          s.template mask<true>(p_, rows_, thread_, first_key, own_key);
        } else {
          s.template mask<false>(p_, rows_, thread_, first_key, own_key);
        }
      }
      if constexpr (T::Variant::kUseSoftmax) {
        softmax_.raise(s.tiles, o_, variant_.exp2_scale, peers());
      } else {
        s.drop_masked();
      }
      if constexpr (S::kWarpsVo == 1) {
        add_values<0>(s, from + S::kValue, first_key, key, head);
      } else {
        add_values_of_peers(s, from + S::kValue, first_key, key, head);
      }
    }
  }

  /// o_ += weights of `s` * v, for its keys from kBegin on: of as many at a time that their weights
  /// need not move to other registers meanwhile. The logits are those of the tile's keys from `key`
  /// on, the tile's first is `first_key`.
  template <int kBegin>
  FLASHPLAN_DEVICE void add_values(Logits<S>& s, uint32_t v_tile, int32_t first_key, int key,
                                   int head) {
    constexpr int kEnd = kBegin + S::kWeightsAtOnce;
    if constexpr (T::Variant::kUseSoftmax) {
      softmax_.template weigh<kBegin / 8, kEnd / 8>(s.tiles, variant_.exp2_scale);
    }
    add_products<S::kWeightsAtOnce>(v_tile, first_key, key + kBegin, head,
                                    [&](uint32_t (&a)[4], int m, int step) {
                                      const int n = kBegin / 8 + 2 * step;
                                      pack_weights<T::kQ>(a, s.tiles[m][n], s.tiles[m][n + 1]);
                                    });
    if constexpr (kEnd < S::kKeysAtOnce) {
      if (visible_end() > first_key + key + kEnd) {
        add_values<kEnd>(s, v_tile, first_key, key, head);
      }
    }
  }

  /// The same where warps share rows, for all keys whose logits they have.
  FLASHPLAN_DEVICE void add_values_of_peers(Logits<S>& s, uint32_t v_tile, int32_t first_key,
                                            int key, int head) {
    if constexpr (T::Variant::kUseSoftmax) {
      softmax_.template weigh<0, S::kLogitKeys / 8>(s.tiles, variant_.exp2_scale);
    } else {
      peers().wait();
    }
    const RowPeers<S> own_peers = peers();
    own_peers.template exchange<T::kQ>(s.tiles);
#pragma unroll
    for (int begin = 0; begin < S::kKeysAtOnce; begin += S::kWeightsAtOnce) {
      if (begin > 0 && visible_end() <= first_key + key + begin) return;
      add_products<S::kWeightsAtOnce>(v_tile, first_key, key + begin, head,
                                      [&](uint32_t (&a)[4], int m, int step) {
                                        own_peers.load_weights(a, m, begin / 16 + step);
                                      });
    }
  }

  /// o_ += weights * v for kKeys of the tile's keys from `key` on.
  template <int kKeys, typename WeightFragment>
  FLASHPLAN_DEVICE void add_products(uint32_t v_tile, int32_t first_key, int key, int head,
                                     WeightFragment weight_fragment) {
    const WarpPlace<S> at(opaque(thread_));
    multiply_values<T::kQ, T::kKv, T::kHeadDimVo, kKeys>(
        o_, v_tile, at.first_dim(), key, at.lane, weight_fragment,
        [&](uint32_t pair, int key_of_tile, int dim) {
          if constexpr (!T::Variant::kTransformsValue) return pair;
          return transformed<T::kQ>(pair, [&](float x, int j) {
            return variant_.value(x, {rows_.request_index, first_key + key_of_tile + j, head, dim});
          });
        });
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
  float o_[S::kMmaM][S::kDimsVo / 8][4];
  uint32_t query_[S::kQueryInRegisters ? T::kHeadDimQk / 16 : 1][S::kMmaM][4];
};

}  // namespace flashplan::device
