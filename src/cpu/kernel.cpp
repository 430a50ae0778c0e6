// SPDX-License-Identifier: Apache-2.0
// The CPU kernel: walks one work queue. Compiled once per instruction set, with FLASHPLAN_ISA as
// its name. Nothing with external linkage but kernel_set() may come out of this file, or the linker
// could give one instruction set's code to another: hence no std:: templates here.
#include "cpu/kernel.h"

#include "abi/real_lens.h"
#include "cpu/float_formats.h"
#include "cpu/scratch.h"

namespace flashplan::cpu::FLASHPLAN_ISA {
namespace {

#include "cpu/kv_tiles.h"
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

  int32_t num_rows() const { return num_kv_heads * rows.num_rows; }
  int64_t token(int32_t i) const {
    return rows.token(i % rows.num_rows, params.schedule.group_size);
  }
  int64_t qo_head(int32_t i) const {
    return rows.qo_head(kv_head + i / rows.num_rows, i % rows.num_rows, params.schedule.group_size);
  }
  /// Of keys [kv_begin, kv_begin + num_keys), those that row i sees, counted from kv_begin.
  KeySpan visible(int32_t i, int32_t kv_begin, int32_t num_keys) const {
    const int32_t query = rows.query(i % rows.num_rows, params.schedule.group_size);
    const KeySpan keys =
        params.mask.visible(segment.position + query, {kv_begin, kv_begin + num_keys});
    if (keys.begin >= keys.end) return {0, 0};
    return {keys.begin - kv_begin, keys.end - kv_begin};
  }
  /// A bit for each key of the tile from kv_begin on: whether the caller's mask lets row i see it.
  uint32_t seen(int32_t i, int32_t kv_begin) const {
    return params.tensors.mask.seen(token(i), kv_begin - first_masked_key);
  }
};
static_assert(kCpuTileKv == 32);  // bits of RowBlock::seen()

void load_queries(const RowBlock& rows, float* to) {
  const AttentionParams& p = rows.params;
  const int32_t width = padded(p.tensors.head_dim_qk);
  dispatch_format(p.tensors.q_dtype, [&](auto format) {
    using QFormat = decltype(format);
    for (int32_t r = 0; r < rows.num_rows(); ++r) {
      const auto* q = static_cast<const typename QFormat::Storage*>(p.tensors.q.data) +
                      rows.token(r) * p.tensors.q.token_stride +
                      rows.qo_head(r) * p.tensors.q.head_stride;
      float* row = to + int64_t{r} * width;
      convert_row<QFormat>(q, row, p.tensors.head_dim_qk);
      for (int32_t d = 0; d < width; ++d) row[d] *= p.variant.logits_scale;
    }
  });
}

/// Attention of `rows` over keys [kv_begin, kv_end): scratch.o normalised, scratch.lse. Not
/// inlined: one copy of the code gives one result per chunk, whoever runs it.
template <typename KvFormat>
[[gnu::noinline]] void compute_state(const RowBlock& rows, int32_t kv_begin, int32_t kv_end,
                                     const Scratch& scratch) {
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
        compute_logits(scratch.q + first * width_qk, rows.rows.num_rows, scratch.kv, num_keys,
                       width_qk, scratch.logits + first * tile_kv, tile_kv);
      }
      const bool is_masked = kv + num_keys > rows.first_masked_key;
      for (int32_t r = 0; r < num_rows; ++r) {
        visible[r] = rows.visible(r, kv, num_keys);
        seen[r] = is_masked ? rows.seen(r, kv) & bits_of(visible[r]) : kAllSeen;
        if (seen[r] == 0) visible[r] = {0, 0};
        float* o = scratch.o + int64_t{r} * width_vo;
        const float shrink = softmax_row(
            scratch.logits + int64_t{r} * tile_kv, num_keys, visible[r], seen[r], p.variant.softcap,
            &scratch.row_max[r], scratch.row_sum + int64_t{r} * kRowPadding);
        if (shrink != 1.0F) {
          for (int32_t d = 0; d < width_vo; ++d) o[d] *= shrink;
        }
      }
      values.advance();
      for (int32_t h = rows.kv_head; h < heads_end; ++h) {
        const int32_t first = (h - rows.kv_head) * rows.rows.num_rows;
        values.load(h, scratch.kv);
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

/// Writes the result of row r, scale * o, and its lse. Sinks join here, so each row's does once.
void write_row(const RowBlock& rows, int32_t r, const float* o, float scale, float lse) {
  const AttentionParams& p = rows.params;
  const int64_t token = rows.token(r);
  const int64_t head = rows.qo_head(r);
  if (p.variant.sinks != nullptr) scale *= add_sink(p.variant.sinks[head], &lse);
  dispatch_format(p.tensors.o_dtype, [&](auto format) {
    using OFormat = decltype(format);
    auto* out = static_cast<typename OFormat::Storage*>(p.tensors.o.data) +
                token * p.tensors.o.token_stride + head * p.tensors.o.head_stride;
    for (int32_t d = 0; d < p.tensors.head_dim_vo; ++d) out[d] = OFormat::store(o[d] * scale);
  });
  if (p.tensors.lse.data != nullptr)
    p.tensors.lse.data[token * p.tensors.lse.token_stride + head * p.tensors.lse.head_stride] = lse;
}

void write_state(const RowBlock& rows, const Scratch& scratch) {
  const int32_t width = padded(rows.params.tensors.head_dim_vo);
  for (int32_t r = 0; r < rows.num_rows(); ++r) {
    write_row(rows, r, scratch.o + int64_t{r} * width, rows.params.variant.v_scale, scratch.lse[r]);
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

/// States merged so far, of all rows.
class Merger {
 public:
  Merger(const RowBlock& rows, const Scratch& scratch) : rows_(rows), scratch_(scratch) {
    const int64_t width = padded(rows.params.tensors.head_dim_vo);
    for (int64_t i = 0; i < rows.num_rows() * width; ++i) scratch.merged_o[i] = 0.0F;
    for (int32_t r = 0; r < rows.num_rows(); ++r) {
      scratch.merged_max[r] = -__builtin_inff();
      scratch.merged_sum[r] = 0.0F;
    }
  }

  void add_row(int32_t r, const float* o, float lse) {
    merge_row(o, lse, rows_.params.tensors.head_dim_vo, merged_o(r), &scratch_.merged_max[r],
              &scratch_.merged_sum[r]);
  }

  void write() {
    for (int32_t r = 0; r < rows_.num_rows(); ++r) {
      const float total = scratch_.merged_sum[r];
      const bool no_keys = total == 0.0F;  // NaN is not 0
      const float scale = no_keys ? 0.0F : rows_.params.variant.v_scale / total;
      const float lse =
          no_keys ? -__builtin_inff() : scratch_.merged_max[r] + __builtin_logf(total);
      write_row(rows_, r, merged_o(r), scale, lse);
    }
  }

 private:
  float* merged_o(int32_t r) const {
    return scratch_.merged_o + int64_t{r} * padded(rows_.params.tensors.head_dim_vo);
  }

  const RowBlock& rows_;
  const Scratch& scratch_;
};

/// Merges the partial results of the rows of one request, in the order of their keys, then those of
/// the prefixes that they are part of, and writes o and lse.
void merge_partials(const AttentionParams& p, const Merge& merge, const Scratch& scratch) {
  const RowBlock rows = {p, merge.rows, {}, 0, merge.kv_head, 1};
  Merger merger(rows, scratch);
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
void arrive(const AttentionParams& p, int32_t number, const Scratch& scratch) {
  const Merge& merge = p.schedule.merges[number];
  const int32_t arrived = __atomic_add_fetch(&p.schedule.arrivals[number], 1, __ATOMIC_ACQ_REL);
  if (arrived != merge.num_pieces) return;
  if (merge.num_readers == 0) merge_partials(p, merge, scratch);
  for (int32_t i = 0; i < merge.num_readers; ++i) {
    arrive(p, merge.first_reader + i * merge.reader_step, scratch);
  }
}

/// Attention of `rows` over `keys`, which are those of `tile`, or fewer where the request is
/// shorter than planned.
template <typename KvFormat>
void run_heads(const RowBlock& rows, const WorkTile& tile, KeySpan keys, const Scratch& scratch) {
  const AttentionParams& p = rows.params;
  load_queries(rows, scratch.q);
  if (p.schedule.chunk_kv == 0) {
    compute_state<KvFormat>(rows, keys.begin, keys.end, scratch);
    if (tile.merge < 0) {
      write_state(rows, scratch);
      return;
    }
    const int32_t heads_before = rows.kv_head - tile.kv_head;
    write_partial(rows, tile.partial_row + heads_before * rows.rows.num_rows, scratch);
  } else {
    // One state per chunk, merged left to right: the same operations whether the chunks are run
    // here or by several work tiles.
    const int32_t width = padded(p.tensors.head_dim_vo);
    Merger merger(rows, scratch);
    int64_t partial_row = tile.partial_row;
    int32_t num_keys = 0;
    for (int32_t kv = keys.begin; kv < keys.end; kv += num_keys) {
      num_keys = min(p.schedule.chunk_kv, keys.end - kv);
      compute_state<KvFormat>(rows, kv, kv + num_keys, scratch);
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
    if (partial_row < rows_end) compute_state<KvFormat>(rows, 0, 0, scratch);
    for (; partial_row < rows_end; partial_row += p.schedule.tile_q) {
      write_partial(rows, partial_row, scratch);
    }
  }
  for (int32_t h = 0; h < rows.num_kv_heads; ++h) {
    arrive(p, tile.merge + rows.kv_head - tile.kv_head + h, scratch);
  }
}

template <DType kv_dtype>
void run_queue(const AttentionParams& p, int32_t cta, std::byte* memory) noexcept {
  Scratch scratch;
  partition(&scratch, memory, p.schedule.tile_q, kCpuTileKv, p.tensors.head_dim_qk,
            p.tensors.head_dim_vo);
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
      run_heads<Format<kv_dtype>>({p, rows, segment, first_masked, h, num_heads}, tile, keys,
                                  scratch);
    }
  }
}

}  // namespace

const KernelSet& kernel_set() noexcept {
  static constexpr KernelSet set = {run_queue<DType::kFloat32>, run_queue<DType::kFloat16>,
                                    run_queue<DType::kBFloat16>, run_queue<DType::kFloat8E4M3>,
                                    run_queue<DType::kFloat8E5M2>};
  return set;
}

}  // namespace flashplan::cpu::FLASHPLAN_ISA
