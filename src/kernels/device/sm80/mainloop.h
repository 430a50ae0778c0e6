// SPDX-License-Identifier: Apache-2.0
// Attention of one work tile by one CTA: mma.sync, ldmatrix and cp.async.
#pragma once

#include "kernels/device/sm80/epilogue.h"
#include "kernels/device/sm80/key_pipeline.h"
#include "kernels/device/sm80/logits.h"
#include "kernels/device/sm80/narrow_queries.h"
#include "kernels/device/sm80/row_peers.h"
#include "kernels/device/sm80/tile_end.h"
#include "kernels/device/sm80/tile_rotator.h"

namespace flashplan::device {

/// Computes the attention of one work tile by all threads of the CTA.
template <typename T, typename S>
class Mainloop {
 public:
  FLASHPLAN_DEVICE Mainloop(const AttentionParams& p, TileContext& context, unsigned char* smem)
      : p_(p),
        context_(context),
        block_(context_.block),
        variant_(p),
        smem_(smem),
        base_(shared_address(smem)),
        thread_(thread_index()),
        computes_(WarpPlace<S>(thread_).computes),
        pipeline_(p, context, base_, thread_) {}

  FLASHPLAN_DEVICE void run() {
    if (block_.keys.begin >= block_.keys.end) {
      finish_without_keys<T>(p_, context_, thread_);
      return;
    }
    pipeline_.fill();
    if (!S::kQueryInStage && computes_) copy_own_queries(context_.tile.kv_head);
    find_visible();
    reset_queries();
    const KeySpan keys = block_.keys;
    for (int32_t head = context_.tile.kv_head; head < context_.heads_end(); ++head) {
      set_head(head);
      int32_t left = keys.end - keys.begin;
      for (int chunk = 0; left > 0; ++chunk) {
        reset();
        const int32_t left_after = left - min(left, context_.chunk_kv);
        do {
          const bool is_first = left == keys.end - keys.begin;
          pipeline_.wait(is_first);
          const typename Pipeline::Cursor tile(keys.end - left, head);
          const bool copies = pipeline_.begin_step(tile, keys);
          const auto copy = [&] {
            if constexpr (!T::Variant::kRotates) pipeline_.copy(copies, tile, keys);
          };
          if constexpr (T::Variant::kRotates) {
            pipeline_.copy(copies, tile, keys);  // these copies run while the stage is rotated
            TileRotator<T, S>(p_, block_, variant_, thread_)
                .rotate(pipeline_.stage_address(pipeline_.stage()), base_ + S::kQuery,
                        keys.end - left, head, is_first);
          }
          if (computes_) {
            if (kPermutesQueries && is_first) permute_own_queries();
            if (S::kQueryInRegisters && is_first) load_queries(pipeline_.stage(), head);
            attend(pipeline_.stage(), keys.end - left, head, copy);
          } else {
            copy();
          }
          pipeline_.end_step(tile, keys);
          left -= T::kTileKv;
        } while (left > left_after);
        if (!S::kQueryInStage && computes_ && left <= 0 && head + 1 < context_.heads_end()) {
          __syncwarp();  // all lanes, and warps that share rows, have read the queries
          copy_own_queries(head + 1);
        }
        if (S::kWarpsVo == 1 || computes_) softmax_.finish(peers());
        Epilogue<T, S>(p_, context_, smem_, thread_, pipeline_.stage_before(), head, chunk,
                       left <= 0)
            .write(softmax_, o_);
      }
    }
    if (context_.tile.merge >= 0) {
      if (T::Variant::kHasChunks && p_.schedule.chunk_kv > 0)
        write_missing_states<T>(p_, context_, thread_);
      // The merge is inlined, so that its code lies close to the loop, because code that lies far
      // away is fetched late. Kernels that are compiled at run time with two bodies have one
      // function for it instead, which both bodies call, so that the kernel compiles faster.
      if constexpr (T::Variant::kIsBuiltIn || T::kFewRowsAlone) {
        constexpr bool kFewRows = S::kRows <= 16;  // few rows may have many states
        arrive_and_merge<T, kFewRows ? 1 : 4, kFewRows ? 16 : 2, !kFewRows>(p_, context_, thread_);
      } else {
        arrive_and_merge_any<T>(p_, context_, thread_);
      }
    }
  }

 private:
  // The bytes of 16 query rows.
  static constexpr int kMmaRowBytes = 16 * T::kHeadDimQk * S::kQueryBytes;
  using Pipeline = KeyPipeline<T, S>;
  // With 8-bit keys, whose fragments have another order of dims, queries are permuted in shared
  // memory if their fragments are read from there in every step.
  static constexpr bool kPermutesQueries = T::kIsNarrow && !S::kQueryInRegisters;
  static constexpr bool kWidensInShared = T::kWidensQueries && !S::kQueryInRegisters;
  static constexpr int kOwnQueries = S::kMmaM * 16 / S::kWarpsVo;  // rows that this warp copies

  /// Multiplies the scale of the logits by the scale of kv head `head`, if kv heads have scales.
  FLASHPLAN_DEVICE void set_head(int32_t head) {
    if (!has_head_scales<T>(p_)) return;
    variant_ = typename T::Variant(p_);
    variant_.scale_logits(head_scale<T>(p_, head));
  }

  FLASHPLAN_DEVICE uint32_t visible_address() const {
    return base_ + FLASHPLAN_OFFSET_OF(typename S::Header, visible) +
           (opaque(thread_) >> 5) * static_cast<int>(sizeof(VisibleKeys));
  }

  FLASHPLAN_DEVICE RowPeers<S> peers() const { return {base_ + S::kPeers, opaque(thread_)}; }

  /// Stores in shared memory which keys this warp's rows see.
  FLASHPLAN_DEVICE void find_visible() const {
    const int first = WarpPlace<S>(thread_).first_row();
    const int last = min(first + S::kMmaM * 16, block_.rows.num_rows) - 1;
    VisibleKeys visible(p_, block_, first, max(first, last));  // none if there are no rows
    visible.to_all.end = min(visible.to_all.end, context_.first_masked_key);
    if (thread_ % 32 == 0) {
      store_shared_16(visible_address(), __builtin_bit_cast(uint4, visible));
    }
  }

  /// The end of the keys that any row sees.
  FLASHPLAN_DEVICE int32_t visible_end() const {
    return static_cast<int32_t>(load_shared_4(visible_address() + VisibleKeys::kAnyEnd));
  }

  /// Copies the queries of this warp's rows. If two warps share rows, each copies half of them. The
  /// last row is copied for rows past it, too.
  FLASHPLAN_DEVICE void copy_own_queries(int head) {
    const WarpPlace<S> at(opaque(thread_));
    using Copy = TileCopy<Element<S::kSharedQ>::kBytes, T::kHeadDimQk, kOwnQueries, 32>;
    const int first_row = at.first_row() + at.warp_vo * kOwnQueries;
    const uint32_t to = base_ + S::kQuery + first_row * Copy::Tile::kRowBytes;
    // Lane r computes the address of row r; other lanes read it by a shuffle.
    const int own_row = min(first_row + at.lane % kOwnQueries, block_.rows.num_rows - 1);
    const unsigned char* own = query_row<T::kQuery>(p_, block_.rows, head, own_row);
    if constexpr (kWidensInShared) {
      copy_narrow_queries<T::kHeadDimQk, kOwnQueries>(
          to, p_.tensors.head_dim_qk, p_.tensors.vectorized, at.lane,
          [&](int row) { return shuffled_pointer(own, row); });
    } else if (pipeline_.copies_16_bytes()) {
#pragma unroll 4
      for (int i = 0; i < Copy::kRowsPerThread; ++i) {
        Copy::copy(to, shuffled_pointer(own, Copy::row(i, at.lane)), i, at.lane);
      }
    } else {
      copy_tile<Element<T::kQuery>::kBytes, T::kHeadDimQk, kOwnQueries, 32>(
          to, p_.tensors.head_dim_qk, p_.tensors.vectorized, at.lane,
          [&](int row) { return shuffled_pointer(own, row); });
    }
    cp_async_commit();
  }

  /// Once this warp's queries have arrived, permutes their dims, and widens 8-bit queries.
  FLASHPLAN_DEVICE void permute_own_queries() const {
    const WarpPlace<S> at(opaque(thread_));
    const int first_row = at.first_row() + at.warp_vo * kOwnQueries;
    if constexpr (kWidensInShared) {
      widen_query_dims<T::kQuery, T::kHeadDimQk, kOwnQueries>(base_ + S::kQuery, first_row,
                                                              at.lane);
    } else {
      permute_query_dims<T::kQ, T::kHeadDimQk, kOwnQueries>(base_ + S::kQuery, first_row, at.lane);
    }
    peers().wait();
  }

  /// The address of this lane's part of the warp's queries.
  FLASHPLAN_DEVICE uint32_t own_query_address(int stage) const {
    const WarpPlace<S> at(opaque(thread_));
    const uint32_t q_tile =
        S::kQueryInStage ? pipeline_.stage_address(stage) + S::kStageQuery : base_ + S::kQuery;
    return query_address<S::kSharedQ, T::kKv, T::kHeadDimQk, kPermutesQueries>(
        q_tile, at.first_row(), at.lane);
  }

  /// Loads fragment `k` of the 16 rows from 16 * m on; `address` is own_query_address().
  FLASHPLAN_DEVICE void load_query(uint32_t (&a)[4], uint32_t address, int m, int k, int head) {
    load_query_fragment<S::kSharedQ, T::kKv, T::kHeadDimQk, kPermutesQueries>(
        a, address + m * kMmaRowBytes, k);
    if constexpr (T::Variant::kTransformsQuery && !T::Variant::kRotates) {
      const WarpPlace<S> place(opaque(thread_));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int dim = query_fragment_dim<T::kKv>(k, i, place.lane);
        if (dim >= p_.tensors.head_dim_qk) continue;  // dims of padding stay zeros
        const ElementPosition at =
            element_position(p_, block_.rows, block_.position, head, place.row(m, i % 2), dim);
        a[i] = transformed<T::kQ>(a[i], [&](float x, int j) {
          return dim + j < p_.tensors.head_dim_qk ? variant_.query(x, at.next(j)) : x;
        });
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

  /// Gives the query registers a value. Without it the compiler treats them as live before the
  /// tile, and spills them in the code of the other tile shapes.
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

  /// Computes one tile of keys, of which this warp takes kKeysPerWarp. `copy` starts the copies of
  /// a later tile to another stage.
  template <typename Copy>
  FLASHPLAN_DEVICE void attend(int stage, int32_t first_key, int head, Copy copy) {
    constexpr int kParts = S::kKeysPerWarp / S::kKeysAtOnce;
    const uint32_t from = pipeline_.stage_address(stage);
    const int warp_key = WarpPlace<S>(opaque(thread_)).warp_kv * S::kKeysPerWarp;
    // The keys that rows see, counted from the first key of the tile.
    VisibleKeys visible = __builtin_bit_cast(VisibleKeys, load_shared_16(visible_address()));
    visible.to_any = {visible.to_any.begin - first_key, visible.to_any.end - first_key};
    visible.to_all = {visible.to_all.begin - first_key,
                      min(visible.to_all.end, context_.load_on_pages()) - first_key};
    if (visible.to_any.begin >= warp_key + S::kKeysPerWarp || visible.to_any.end <= warp_key) {
      copy();
      return;
    }
// With 8-bit keys the code for kKeysAtOnce keys takes all registers, so the loop is not unrolled.
#pragma unroll T::kIsNarrow ? 1 : kParts
    for (int part = 0; part < kParts; ++part) {
      const int key = warp_key + part * S::kKeysAtOnce;
      if (part > 0 && visible.to_any.end <= key) return;
      const int own_key = key + WarpPlace<S>(opaque(thread_)).warp_vo * S::kLogitKeys;
      const uint32_t address = own_query_address(stage);
      Logits<S> s = {};
      gemm_qk<T::kQ, T::kKv, T::kHeadDimQk, S::kMmaM, S::kLogitKeys>(
          s.tiles, from, own_key, opaque(thread_) & 31,
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
            if constexpr (!T::Variant::kTransformsKey || T::Variant::kRotates) return pair;
            if (dim >= p_.tensors.head_dim_qk) return pair;  // dims of padding stay zeros
            const ElementPosition at = {
                block_.rows.segment, min(first_key + key_of_tile, block_.last_key(p_)), head, dim};
            return transformed<T::kQ>(pair, [&](float x, int j) {
              return dim + j < p_.tensors.head_dim_qk ? variant_.key(x, at.next(j)) : x;
            });
          });
      s.template transform<typename T::Variant>(p_, block_, variant_, thread_, first_key + own_key,
                                                head);
      if (visible.to_all.begin > own_key || visible.to_all.end < own_key + S::kLogitKeys) {
        asm volatile("");  // keeps this a branch instead of selects for every tile
        // Kernels that are compiled at run time have one instance of mask(), to compile faster.
        if (!T::Variant::kIsBuiltIn || visible.to_all.begin > own_key) {
          s.template mask<true>(p_, block_, thread_, first_key, own_key);
        } else {
          s.template mask<false>(p_, block_, thread_, first_key, own_key);
        }
        if (T::Variant::kHasMaskBits && p_.tensors.mask.is_given) {
          s.mask_bits(p_, block_, thread_, first_key + own_key - context_.first_masked_key);
        }
        if (__builtin_expect(static_cast<long>(context_.load_on_pages() != kAllOnPages), 0L) != 0) {
          s.mask_pages(p_, block_, context_.page_ids, thread_, first_key + own_key);
        }
      }
      if constexpr (T::Variant::kUseSoftmax) {
        softmax_.rescale(s.tiles, o_, variant_.exp2_scale, peers());
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

  /// o_ += weights of `s` * v, for the keys from kBegin on. It takes S::kWeightsAtOnce keys at a
  /// time, because the weights of more keys would not fit into registers beside the logits. The
  /// first key of `s` is number `key` of the tile, whose first key is number `first_key` of the
  /// request.
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
                                      pack_weights<T::kWeight>(a, s.tiles[m][n], s.tiles[m][n + 1]);
                                    });
    if constexpr (kEnd < S::kKeysAtOnce) {
      if (visible_end() > first_key + key + kEnd) {
        add_values<kEnd>(s, v_tile, first_key, key, head);
      }
    }
  }

  /// Takes the place of add_values() where warps share rows. Exchanges weights with these warps,
  /// and adds the weighted values of the keys of all of them.
  FLASHPLAN_DEVICE void add_values_of_peers(Logits<S>& s, uint32_t v_tile, int32_t first_key,
                                            int key, int head) {
    if constexpr (T::Variant::kUseSoftmax) {
      softmax_.template weigh<0, S::kLogitKeys / 8>(s.tiles, variant_.exp2_scale);
    } else {
      peers().wait();
    }
    const RowPeers<S> own_peers = peers();
    own_peers.template exchange<T::kWeight>(s.tiles);
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
    gemm_pv<T::kWeight, T::kKv, T::kHeadDimVo, kKeys>(
        o_, v_tile, at.first_dim(), key, at.lane, weight_fragment,
        [&](uint32_t pair, int key_of_tile, int dim) {
          if constexpr (!T::Variant::kTransformsValue) return pair;
          if (dim >= p_.tensors.head_dim_vo) return pair;
          return transformed<T::kWeight>(pair, [&](float x, int j) {
            const int32_t key = min(first_key + key_of_tile + j, block_.last_key(p_));
            return variant_.value(x, {block_.rows.segment, key, head, dim});
          });
        });
  }

  const AttentionParams& p_;
  TileContext& context_;
  const RowBlock& block_;
  typename T::Variant variant_;
  unsigned char* const smem_;
  const uint32_t base_;
  const int thread_;
  const bool computes_;  // false for a warp that only copies
  Pipeline pipeline_;

  OnlineSoftmax<S::kMmaM> softmax_;
  float o_[S::kMmaM][S::kDimsVo / 8][4];
  uint32_t query_[S::kQueryInRegisters ? T::kHeadDimQk / 16 : 1][S::kMmaM][4];
};

}  // namespace flashplan::device
