// SPDX-License-Identifier: Apache-2.0
// The CPU kernel, which executes one work queue. kernels.cpp, which is compiled once for each
// instruction set, includes this file, and so does the source of a user's variant. FLASHPLAN_ISA is
// the name of a namespace for the contents.
#pragma once

#include "abi/begin_tile.h"
#include "abi/variant.h"
#include "cpu/float_formats.h"
#include "cpu/kernel.h"
#include "cpu/scratch.h"

namespace flashplan::cpu::FLASHPLAN_ISA {
namespace {

#include "cpu/kv_tiles.h"
#include "cpu/rotation.h"
#include "cpu/variant.h"
#include "cpu/vec.h"
// Each of the next headers uses those above it.
#include "cpu/tile_math.h"

#include "cpu/row_block.h"

#include "cpu/merge_partials.h"

/// Rotates a converted row of q or k.
FLASHPLAN_INLINE void rotate_row(const RopeTurns& rope, const Rotations& rotations, float* row) {
  rotate_head<Format<DType::kFloat32>>(rope, rotations, row, row);
}

template <typename Variant>
void load_queries(const RowBlock& rows, const Variant& variant, float* to) {
  const AttentionParams& p = rows.params;
  const int32_t width = padded(p.tensors.head_dim_qk);
  const RopeTurns* rope = p.host.rope;
  Rotations rotations;  // of the position of the row that was rotated last
  dispatch_format(p.tensors.q_dtype, [&](auto format) {
    using QFormat = decltype(format);
    for (int32_t r = 0; r < rows.num_rows(); ++r) {
      const auto* q = static_cast<const typename QFormat::Storage*>(p.tensors.q.data) +
                      rows.token(r) * p.tensors.q.token_stride +
                      rows.qo_head(r) * p.tensors.q.head_stride;
      float* row = to + int64_t{r} * width;
      const int32_t num_dims = p.tensors.head_dim_qk - p.tails.q_dims;
      convert_row<QFormat>(q, row, num_dims, width);
      if (p.tails.q_dims > 0) {
        const auto* tail = static_cast<const typename QFormat::Storage*>(p.tails.q.data) +
                           rows.token(r) * p.tails.q.token_stride +
                           rows.qo_head(r) * p.tails.q.head_stride;
        convert_row<QFormat>(tail, row + num_dims, p.tails.q_dims, width - num_dims);
      }
      if constexpr (Variant::kTransformsQuery) {
        const ElementPosition at = rows.element_position(r);
        for (int32_t d = 0; d < p.tensors.head_dim_qk; ++d)
          row[d] = variant.query(row[d], at.next(d));
      }
      if (rope != nullptr) {
        if (r == 0 || rows.position(r) != rows.position(r - 1)) {
          fill_rotations(*rope, rows.position(r), rotations);
        }
        rotate_row(*rope, rotations, row);
      }
      const float scale = p.variant.logits_scale * p.head_scale(rows.kv_head_of(r));
      for (int32_t d = 0; d < width; ++d) row[d] *= scale;
    }
  });
}

/// Applies a hook to all elements of a converted tile, the keys or values of a head from kv_begin
/// on.
template <typename Hook>
FLASHPLAN_INLINE void transform_tile(const RowBlock& rows, int32_t kv_head, int32_t kv_begin,
                                     int32_t num_keys, int32_t head_dim, float* tile, Hook hook) {
  for (int32_t j = 0; j < num_keys; ++j) {
    const ElementPosition at = {rows.request, kv_begin + j, kv_head, 0};
    float* row = tile + int64_t{j} * padded(head_dim);
    for (int32_t d = 0; d < head_dim; ++d) row[d] = hook(row[d], at.next(d));
  }
}

/// Applies the variant's hooks to the logits of row r and the `visible` keys from kv_begin on.
/// Returns `seen` without the keys that the variant hides.
template <typename Variant>
FLASHPLAN_INLINE uint32_t transform_logits(const RowBlock& rows, const Variant& variant, int32_t r,
                                           int32_t kv_begin, KeySpan visible, uint32_t seen,
                                           float* logits) {
  LogitPosition at = rows.logit_position(r);
  for (int32_t j = visible.begin; j < visible.end; ++j) {
    at.key = kv_begin + j;
    if constexpr (Variant::kTransformsLogits) logits[j] = variant.logit(logits[j], at);
    if constexpr (Variant::kMasksLogits) {
      if (!variant.visible(at)) seen &= ~(uint32_t{1} << j);
    }
  }
  return seen;
}

/// Computes the attention of `rows` over keys [kv_begin, kv_end): the normalised scratch.o, and
/// scratch.lse. Without a softmax scratch.o is a sum, and scratch.lse is 0. It is not inlined, so
/// that there is one copy of the code and a chunk always has the same bits.
template <typename KvFormat, typename Variant>
[[gnu::noinline]] void compute_state(const RowBlock& rows, const Variant& variant, int32_t kv_begin,
                                     int32_t kv_end, const Scratch& scratch) {
  const AttentionParams& p = rows.params;
  const int32_t width_qk = padded(p.tensors.head_dim_qk);
  const int32_t width_vo = padded(p.tensors.head_dim_vo);
  const int32_t num_rows = rows.num_rows();
  KeySpan visible[kCpuTileQ];
  uint32_t seen[kCpuTileQ];

  for (int32_t r = 0; r < num_rows; ++r) scratch.row_max[r] = -__builtin_inff();
  for (int32_t i = 0; i < num_rows * kRowPadding; ++i) scratch.row_sum[i] = 0.0F;
  for (int64_t i = 0; i < int64_t{num_rows} * width_vo; ++i) scratch.o[i] = 0.0F;

  using Tiles = KvTiles<KvFormat>;
  const int32_t heads_end = rows.kv_head + rows.num_kv_heads;
  const int32_t tile_kv = kCpuTileKv;
  if (kv_begin < kv_end) {
    const bool shared_kv = p.host.shared_kv;
    const KeyTail no_tail;
    Tiles keys({p.tensors.k, p.tails.k, p.tensors.pages, p.lists, p.tensors.head_dim_qk},
               rows.segment, kv_begin, kv_end, rows.num_kv_heads);
    Tiles values({p.tensors.v, no_tail, p.tensors.pages, p.lists, p.tensors.head_dim_vo},
                 rows.segment, kv_begin, shared_kv ? kv_begin : kv_end, rows.num_kv_heads);
    const int32_t width_of_values = shared_kv ? width_qk : width_vo;
    int32_t num_keys = 0;
    for (int32_t kv = kv_begin; kv < kv_end; kv += num_keys) {  // kv + tile_kv might overflow
      num_keys = min(tile_kv, kv_end - kv);
      // A tile of keys is computed for all heads before the next tile is read, because the heads of
      // a token are neighbours in memory.
      keys.advance();
      const RopeTurns* rope = p.host.rope;
      auto* rotations = reinterpret_cast<Rotations*>(scratch.rotations);  // one for each key
      for (int32_t j = 0; rope != nullptr && j < num_keys; ++j) {
        fill_rotations(*rope, kv + j, rotations[j]);
      }
      for (int32_t h = rows.kv_head; h < heads_end; ++h) {
        const int64_t first = int64_t{h - rows.kv_head} * rows.rows.num_rows;
        keys.load(h, scratch.kv, width_qk);
        if constexpr (Variant::kTransformsKey) {
          transform_tile(rows, h, kv, num_keys, p.tensors.head_dim_qk, scratch.kv,
                         [&](float x, const ElementPosition& at) { return variant.key(x, at); });
        }
        for (int32_t j = 0; rope != nullptr && j < num_keys; ++j) {
          rotate_row(*rope, rotations[j], scratch.kv + int64_t{j} * width_qk);
        }
        compute_logits(scratch.q + first * width_qk, rows.rows.num_rows, scratch.kv, num_keys,
                       width_qk, scratch.logits + first * tile_kv, tile_kv);
      }
      const bool has_bits = kv + num_keys > rows.first_masked_key;
      const bool is_masked = has_bits || Variant::kMasksLogits || p.lists.slots != nullptr;
      for (int32_t r = 0; r < num_rows; ++r) {
        visible[r] = rows.visible(r, kv, num_keys);
        seen[r] = is_masked ? bits_of(visible[r]) & keys.found() : kAllSeen;
        if (has_bits) seen[r] &= rows.seen(r, kv);
        float* logits = scratch.logits + int64_t{r} * tile_kv;
        if constexpr (Variant::kTransformsLogits || Variant::kMasksLogits) {
          seen[r] = transform_logits(rows, variant, r, kv, visible[r], seen[r], logits);
        }
        if (seen[r] == 0) visible[r] = {0, 0};
        if constexpr (!Variant::kUseSoftmax) {
          drop_infinite(logits, visible[r]);
          continue;
        }
        float* o = scratch.o + int64_t{r} * width_vo;
        const float shrink =
            softmax_row(logits, num_keys, visible[r], seen[r], p.variant.softcap,
                        &scratch.row_max[r], scratch.row_sum + int64_t{r} * kRowPadding);
        if (shrink != 1.0F) {
          for (int32_t d = 0; d < width_vo; ++d) o[d] *= shrink;
        }
      }
      if (!shared_kv) values.advance();
      for (int32_t h = rows.kv_head; h < heads_end; ++h) {
        const int32_t first = (h - rows.kv_head) * rows.rows.num_rows;
        // With shared_kv there is one head, so scratch.kv still holds its keys, which are the
        // values.
        if (!shared_kv) values.load(h, scratch.kv, width_vo);
        if constexpr (Variant::kTransformsValue) {
          transform_tile(rows, h, kv, num_keys, p.tensors.head_dim_vo, scratch.kv,
                         [&](float x, const ElementPosition& at) { return variant.value(x, at); });
        }
        const float* p_rows = scratch.logits + int64_t{first} * tile_kv;
        float* o_rows = scratch.o + int64_t{first} * width_vo;
        if (is_masked) {
          add_seen_values(p_rows, tile_kv, seen + first, rows.rows.num_rows, scratch.kv,
                          width_of_values, width_vo, o_rows);
        } else {
          add_values(p_rows, tile_kv, visible + first, rows.rows.num_rows, scratch.kv,
                     width_of_values, width_vo, o_rows);
        }
      }
    }
  }
  for (int32_t r = 0; r < num_rows; ++r) {
    if constexpr (!Variant::kUseSoftmax) {
      scratch.lse[r] = 0.0F;
      continue;
    }
    const float total = sum_of_lanes(load(scratch.row_sum + int64_t{r} * kRowPadding));
    if (total == 0.0F) {  // there was no visible key, and o is still 0; a NaN is not 0
      scratch.lse[r] = -__builtin_inff();
      continue;
    }
    const float inverse = 1.0F / total;
    float* o = scratch.o + int64_t{r} * width_vo;
    for (int32_t d = 0; d < width_vo; ++d) o[d] *= inverse;
    scratch.lse[r] = scratch.row_max[r] + __builtin_logf(total);
  }
}

/// Runs `rows` over `keys`, which are those of `tile`, or fewer if the request is shorter than
/// planned.
template <typename KvFormat, typename Variant>
void run_heads(const RowBlock& rows, const Variant& variant, const WorkTile& tile, KeySpan keys,
               const Scratch& scratch) {
  const AttentionParams& p = rows.params;
  load_queries(rows, variant, scratch.q);
  if (p.schedule.chunk_kv == 0) {
    compute_state<KvFormat>(rows, variant, keys.begin, keys.end, scratch);
    if (tile.merge < 0) {
      write_state(rows, variant, scratch);
      return;
    }
    const int32_t heads_before = rows.kv_head - tile.kv_head;
    write_partial(rows, tile.partial_row + heads_before * rows.rows.num_rows, scratch);
  } else {
    // There is one state per chunk, and states are merged left to right. These are the same
    // operations as when several work tiles run the chunks, so the results have the same bits.
    const int32_t width = padded(p.tensors.head_dim_vo);
    MergedRows merged(rows, variant, scratch);
    int64_t partial_row = tile.partial_row;
    int32_t num_keys = 0;
    for (int32_t kv = keys.begin; kv < keys.end; kv += num_keys) {
      num_keys = min(p.schedule.chunk_kv, keys.end - kv);
      compute_state<KvFormat>(rows, variant, kv, kv + num_keys, scratch);
      if (tile.merge >= 0) {
        write_partial(rows, partial_row, scratch);
        partial_row += p.schedule.tile_q;
        continue;
      }
      for (int32_t r = 0; r < rows.num_rows(); ++r) {
        merged.add_row(r, scratch.o + int64_t{r} * width, scratch.lse[r]);
      }
    }
    if (tile.merge < 0) {
      merged.write();
      return;
    }
    // Planned chunks beyond the real length have empty states.
    const int32_t num_states = num_chunk_states(tile, p.schedule.merges[tile.merge], p);
    const int64_t rows_end = tile.partial_row + int64_t{num_states} * p.schedule.tile_q;
    if (partial_row < rows_end) compute_state<KvFormat>(rows, variant, 0, 0, scratch);
    for (; partial_row < rows_end; partial_row += p.schedule.tile_q) {
      write_partial(rows, partial_row, scratch);
    }
  }
  for (int32_t h = 0; h < rows.num_kv_heads; ++h) {
    arrive(p, variant, tile.merge + rows.kv_head - tile.kv_head + h, scratch);
  }
}

template <DType kv_dtype, typename Variant>
void run_queue(const AttentionParams& p, int32_t cta, std::byte* memory) noexcept {
  Scratch scratch;
  partition(&scratch, memory, p.schedule.tile_q, kCpuTileKv, p.tensors.head_dim_qk,
            p.tensors.head_dim_vo, p.host.rope != nullptr);
  const Variant variant(p);
  for (int32_t i = p.host.cta_indptr[cta]; i < p.host.cta_indptr[cta + 1]; ++i) {
    const WorkTile& tile = p.schedule.tiles[i];
    Segment segment = p.schedule.segments[tile.segment];
    const BegunTile begun = begin_tile(p, kCpuTileKv, tile, segment);
    segment.position = begun.position;
    // Takes as many heads at a time as the scratch memory has rows for.
    const int32_t heads_end = tile.kv_head + tile.num_kv_heads;
    const int32_t heads_at_once = p.schedule.tile_q / begun.rows.num_rows;
    for (int32_t h = tile.kv_head; h < heads_end; h += heads_at_once) {
      const int32_t num_heads = min(heads_at_once, heads_end - h);
      run_heads<Format<kv_dtype>>({.params = p,
                                   .rows = begun.rows,
                                   .segment = segment,
                                   .first_masked_key = begun.first_masked_key,
                                   .kv_head = h,
                                   .num_kv_heads = num_heads,
                                   .request = begun.request},
                                  variant, tile, begun.keys, scratch);
    }
  }
}

}  // namespace
}  // namespace flashplan::cpu::FLASHPLAN_ISA
