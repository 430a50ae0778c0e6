// SPDX-License-Identifier: Apache-2.0
// The CPU kernel: walks one work queue. Included by kernels.cpp, once per instruction set, and by
// the source of a user's variant; FLASHPLAN_ISA is the name of a namespace for it.
#pragma once

#include "abi/real_lens.h"
#include "abi/variant.h"
#include "cpu/float_formats.h"
#include "cpu/kernel.h"
#include "cpu/scratch.h"

namespace flashplan::cpu::FLASHPLAN_ISA {
namespace {

#include "cpu/kv_tiles.h"
#include "cpu/variant.h"
#include "cpu/vec.h"
// After vec.h, which it uses.
#include "cpu/tile_math.h"

FLASHPLAN_INLINE int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }

/// The rows of a work tile, for consecutive kv heads: row i is row i % num_rows of `rows`, of head
/// kv_head + i / num_rows.
struct RowBlock {
  const AttentionParams& params;
  PackedRows rows;
  Segment segment;
  int32_t first_masked_key;
  int32_t kv_head;
  int32_t num_kv_heads;
  int32_t request;

  int32_t num_rows() const { return num_kv_heads * rows.num_rows; }
  int64_t token(int32_t i) const {
    return rows.token(i % rows.num_rows, params.schedule.group_size);
  }
  int32_t kv_head_of(int32_t i) const { return kv_head + i / rows.num_rows; }
  int64_t qo_head(int32_t i) const {
    return rows.qo_head(kv_head_of(i), i % rows.num_rows, params.schedule.group_size);
  }
  /// The position of row i's query among the keys.
  int32_t position(int32_t i) const {
    return segment.position + rows.query(i % rows.num_rows, params.schedule.group_size);
  }
  /// Of keys [kv_begin, kv_begin + num_keys), those that row i sees, counted from kv_begin.
  KeySpan visible(int32_t i, int32_t kv_begin, int32_t num_keys) const {
    const KeySpan keys = params.mask.visible(position(i), {kv_begin, kv_begin + num_keys});
    if (keys.begin >= keys.end) return {0, 0};
    return {keys.begin - kv_begin, keys.end - kv_begin};
  }
  /// Where the logit of row i and key 0 stands.
  LogitPosition logit_position(int32_t i) const {
    return {request,
            position(i),
            0,
            static_cast<int32_t>(qo_head(i)),
            kv_head_of(i),
            segment.qo_len,
            segment.position + segment.qo_len};
  }
  /// Where the first element of row i of q and o stands.
  ElementPosition element_position(int32_t i) const {
    return {request, position(i), static_cast<int32_t>(qo_head(i)), 0};
  }
  /// A bit for each key of the tile from kv_begin on: whether the caller's mask lets row i see it.
  uint32_t seen(int32_t i, int32_t kv_begin) const {
    return params.tensors.mask.seen(token(i), kv_begin - first_masked_key);
  }
};
static_assert(kCpuTileKv == 32);  // bits of RowBlock::seen()

template <typename Variant>
void load_queries(const RowBlock& rows, const Variant& variant, float* to) {
  const AttentionParams& p = rows.params;
  const int32_t width = padded(p.tensors.head_dim_qk);
  dispatch_wide_format(p.tensors.q_dtype, [&](auto format) {
    using QFormat = decltype(format);
    for (int32_t r = 0; r < rows.num_rows(); ++r) {
      const auto* q = static_cast<const typename QFormat::Storage*>(p.tensors.q.data) +
                      rows.token(r) * p.tensors.q.token_stride +
                      rows.qo_head(r) * p.tensors.q.head_stride;
      float* row = to + int64_t{r} * width;
      convert_row<QFormat>(q, row, p.tensors.head_dim_qk);
      if constexpr (Variant::kTransformsQuery) {
        const ElementPosition at = rows.element_position(r);
        for (int32_t d = 0; d < p.tensors.head_dim_qk; ++d)
          row[d] = variant.query(row[d], at.next(d));
      }
      const float scale = p.variant.logits_scale * p.variant.k_scales.of(rows.kv_head_of(r));
      for (int32_t d = 0; d < width; ++d) row[d] *= scale;
    }
  });
}

/// Applies a hook for elements to a converted tile of the keys of a head from kv_begin on.
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

/// Attention of `rows` over keys [kv_begin, kv_end): scratch.o normalised, scratch.lse. Without a
/// softmax scratch.o is a sum, and scratch.lse is 0. Not inlined: one copy of the code gives one
/// result per chunk, whoever runs it.
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
    Tiles keys(p.tensors.k, p.tensors.pages, rows.segment, kv_begin, kv_end, rows.num_kv_heads,
               p.tensors.head_dim_qk);
    Tiles values(p.tensors.v, p.tensors.pages, rows.segment, kv_begin, kv_end, rows.num_kv_heads,
                 p.tensors.head_dim_vo);
    int32_t num_keys = 0;
    for (int32_t kv = kv_begin; kv < kv_end; kv += num_keys) {  // kv + tile_kv might overflow
      num_keys = min(tile_kv, kv_end - kv);
      // Heads one after the other within a tile: those of a token lie side by side in memory.
      keys.advance();
      for (int32_t h = rows.kv_head; h < heads_end; ++h) {
        const int64_t first = int64_t{h - rows.kv_head} * rows.rows.num_rows;
        keys.load(h, scratch.kv);
        if constexpr (Variant::kTransformsKey) {
          transform_tile(rows, h, kv, num_keys, p.tensors.head_dim_qk, scratch.kv,
                         [&](float x, const ElementPosition& at) { return variant.key(x, at); });
        }
        compute_logits(scratch.q + first * width_qk, rows.rows.num_rows, scratch.kv, num_keys,
                       width_qk, scratch.logits + first * tile_kv, tile_kv);
      }
      const bool has_bits = kv + num_keys > rows.first_masked_key;
      const bool is_masked = has_bits || Variant::kMasksLogits;
      for (int32_t r = 0; r < num_rows; ++r) {
        visible[r] = rows.visible(r, kv, num_keys);
        seen[r] = is_masked ? bits_of(visible[r]) : kAllSeen;
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
      values.advance();
      for (int32_t h = rows.kv_head; h < heads_end; ++h) {
        const int32_t first = (h - rows.kv_head) * rows.rows.num_rows;
        values.load(h, scratch.kv);
        if constexpr (Variant::kTransformsValue) {
          transform_tile(rows, h, kv, num_keys, p.tensors.head_dim_vo, scratch.kv,
                         [&](float x, const ElementPosition& at) { return variant.value(x, at); });
        }
        const float* p_rows = scratch.logits + int64_t{first} * tile_kv;
        float* o_rows = scratch.o + int64_t{first} * width_vo;
        if (is_masked) {
          add_seen_values(p_rows, tile_kv, seen + first, rows.rows.num_rows, scratch.kv, width_vo,
                          o_rows);
        } else {
          add_values(p_rows, tile_kv, visible + first, rows.rows.num_rows, scratch.kv, width_vo,
                     o_rows);
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
    if (total == 0.0F) {  // no visible key: o is still 0. (NaN is not 0.)
      scratch.lse[r] = -__builtin_inff();
      continue;
    }
    const float inverse = 1.0F / total;
    float* o = scratch.o + int64_t{r} * width_vo;
    for (int32_t d = 0; d < width_vo; ++d) o[d] *= inverse;
    scratch.lse[r] = scratch.row_max[r] + __builtin_logf(total);
  }
}

/// Writes the result of row r, which is scale * v_scale * o, and its lse. Sinks join here, so each
/// row's does once.
template <typename Variant>
void write_row(const RowBlock& rows, const Variant& variant, int32_t r, const float* o, float scale,
               float lse) {
  const AttentionParams& p = rows.params;
  const int64_t token = rows.token(r);
  const int64_t head = rows.qo_head(r);
  if (p.variant.sinks != nullptr) scale *= add_sink(p.variant.sinks[head], &lse);
  scale *= p.variant.v_scale * p.variant.v_scales.of(rows.kv_head_of(r));
  dispatch_wide_format(p.tensors.o_dtype, [&](auto format) {
    using OFormat = decltype(format);
    auto* out = static_cast<typename OFormat::Storage*>(p.tensors.o.data) +
                token * p.tensors.o.token_stride + head * p.tensors.o.head_stride;
    if constexpr (Variant::kTransformsOutput) {
      const ElementPosition at = rows.element_position(r);
      for (int32_t d = 0; d < p.tensors.head_dim_vo; ++d) {
        out[d] = OFormat::store(variant.output(o[d] * scale, at.next(d)));
      }
    } else {
      for (int32_t d = 0; d < p.tensors.head_dim_vo; ++d) out[d] = OFormat::store(o[d] * scale);
    }
  });
  if (p.tensors.lse.data != nullptr)
    p.tensors.lse.data[token * p.tensors.lse.token_stride + head * p.tensors.lse.head_stride] = lse;
}

template <typename Variant>
void write_state(const RowBlock& rows, const Variant& variant, const Scratch& scratch) {
  const int32_t width = padded(rows.params.tensors.head_dim_vo);
  for (int32_t r = 0; r < rows.num_rows(); ++r) {
    write_row(rows, variant, r, scratch.o + int64_t{r} * width, 1.0F, scratch.lse[r]);
  }
}

void write_partial(const RowBlock& rows, int64_t first_row, const Scratch& scratch) {
  const AttentionParams& p = rows.params;
  const int32_t width = padded(p.tensors.head_dim_vo);
  for (int32_t r = 0; r < rows.num_rows(); ++r) {
    float* to = p.workspace.partial_o + (first_row + r) * p.tensors.head_dim_vo;
    const float* from = scratch.o + int64_t{r} * width;
    for (int32_t d = 0; d < p.tensors.head_dim_vo; ++d) to[d] = from[d];
    p.workspace.partial_lse[first_row + r] = scratch.lse[r];
  }
}

/// States merged so far, of all rows. Without a softmax they add up.
template <typename Variant>
class Merger {
 public:
  Merger(const RowBlock& rows, const Variant& variant, const Scratch& scratch)
      : rows_(rows), variant_(variant), scratch_(scratch) {
    const int64_t width = padded(rows.params.tensors.head_dim_vo);
    for (int64_t i = 0; i < rows.num_rows() * width; ++i) scratch.merged_o[i] = 0.0F;
    for (int32_t r = 0; r < rows.num_rows(); ++r) {
      scratch.merged_max[r] = -__builtin_inff();
      scratch.merged_sum[r] = 0.0F;
    }
  }

  void add_row(int32_t r, const float* o, float lse) {
    if constexpr (!Variant::kUseSoftmax) {
      for (int32_t d = 0; d < rows_.params.tensors.head_dim_vo; ++d) merged_o(r)[d] += o[d];
      return;
    }
    merge_row(o, lse, rows_.params.tensors.head_dim_vo, merged_o(r), &scratch_.merged_max[r],
              &scratch_.merged_sum[r]);
  }

  void write() {
    for (int32_t r = 0; r < rows_.num_rows(); ++r) {
      if constexpr (!Variant::kUseSoftmax) {
        write_row(rows_, variant_, r, merged_o(r), 1.0F, 0.0F);
        continue;
      }
      const float total = scratch_.merged_sum[r];
      const bool no_keys = total == 0.0F;  // NaN is not 0
      const float scale = no_keys ? 0.0F : 1.0F / total;
      const float lse =
          no_keys ? -__builtin_inff() : scratch_.merged_max[r] + __builtin_logf(total);
      write_row(rows_, variant_, r, merged_o(r), scale, lse);
    }
  }

 private:
  float* merged_o(int32_t r) const {
    return scratch_.merged_o + int64_t{r} * padded(rows_.params.tensors.head_dim_vo);
  }

  const RowBlock& rows_;
  const Variant& variant_;
  const Scratch& scratch_;
};

/// Merges the partial results of the rows of one request, in the order of their keys, then those of
/// the prefixes that they are part of, and writes o and lse.
template <typename Variant>
void merge_partials(const AttentionParams& p, const Variant& variant, const Merge& merge,
                    const Scratch& scratch) {
  // Plans of variants share no prefixes, so a segment is a request.
  const int32_t request = merge.rows.segment;
  Segment segment = {};
  if constexpr (Variant::kTransformsOutput) {
    segment = p.schedule.segments[request];
    segment.position = real_length(p, segment, request) - segment.qo_len;
  }
  const RowBlock rows = {p, merge.rows, segment, 0, merge.kv_head, 1, request};
  Merger merger(rows, variant, scratch);
  const Merge* from = &merge;
  for (;;) {
    int64_t first_row =
        from->first_partial_row + rows.rows.row_in(from->rows, p.schedule.group_size);
    for (int32_t i = 0; i < from->num_states; ++i, first_row += p.schedule.tile_q) {
      for (int32_t r = 0; r < rows.num_rows(); ++r) {
        merger.add_row(r, p.workspace.partial_o + (first_row + r) * p.tensors.head_dim_vo,
                       p.workspace.partial_lse[first_row + r]);
      }
    }
    if (from->parent < 0) break;
    from = &p.schedule.merges[from->parent];
  }
  merger.write();
}

/// Arrives at a merge. The last to arrive sees what all others wrote, and finishes the merge.
template <typename Variant>
void arrive(const AttentionParams& p, const Variant& variant, int32_t number,
            const Scratch& scratch) {
  const Merge& merge = p.schedule.merges[number];
  const int32_t arrived = __atomic_add_fetch(&p.schedule.arrivals[number], 1, __ATOMIC_ACQ_REL);
  if (arrived != merge.num_pieces) return;
  if (merge.num_readers == 0) merge_partials(p, variant, merge, scratch);
  for (int32_t i = 0; i < merge.num_readers; ++i) {
    arrive(p, variant, merge.first_reader + i * merge.reader_step, scratch);
  }
}

/// Attention of `rows` over `keys`, which are those of `tile`, or fewer where the request is
/// shorter than planned.
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
    // One state per chunk, merged left to right: the same operations whether the chunks are run
    // here or by several work tiles.
    const int32_t width = padded(p.tensors.head_dim_vo);
    Merger merger(rows, variant, scratch);
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
        merger.add_row(r, scratch.o + int64_t{r} * width, scratch.lse[r]);
      }
    }
    if (tile.merge < 0) {
      merger.write();
      return;
    }
    // Chunks beyond the real length.
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
            p.tensors.head_dim_vo);
  const Variant variant(p);
  for (int32_t i = p.host.cta_indptr[cta]; i < p.host.cta_indptr[cta + 1]; ++i) {
    const WorkTile& tile = p.schedule.tiles[i];
    Segment segment = p.schedule.segments[tile.segment];
    const int32_t row_begin = tile.row_tile * p.schedule.tile_q;
    const int32_t num_rows =
        min(p.schedule.tile_q, segment.qo_len * p.schedule.group_size.value - row_begin);
    const PackedRows rows = {tile.segment, segment.qo_begin, row_begin, num_rows};
    KeySpan keys = {tile.kv_begin, tile.kv_end};
    const int32_t request = request_of(tile, segment, p.tensors.pages);
    if (has_real_length(p, segment)) {
      fit_to_length(p.mask, rows, p.schedule.group_size, kCpuTileKv, p.tensors.kv_lens[request],
                    segment, keys);
    }
    const int32_t first_masked = first_masked_key(p, request, segment.position);
    // As many heads at a time as the scratch has rows for.
    const int32_t heads_end = tile.kv_head + tile.num_kv_heads;
    const int32_t heads_at_once = p.schedule.tile_q / num_rows;
    for (int32_t h = tile.kv_head; h < heads_end; h += heads_at_once) {
      const int32_t num_heads = min(heads_at_once, heads_end - h);
      run_heads<Format<kv_dtype>>({p, rows, segment, first_masked, h, num_heads, request}, variant,
                                  tile, keys, scratch);
    }
  }
}

}  // namespace
}  // namespace flashplan::cpu::FLASHPLAN_ISA
