// SPDX-License-Identifier: Apache-2.0
// The CPU kernel: walks one work queue. Compiled once per instruction set, with FLASHPLAN_ISA as
// its name. Nothing with external linkage but kernel_set() may come out of this file, or the linker
// could give one instruction set's code to another: hence no std:: templates here.
#include "cpu/kernel.h"

#include "cpu/float_formats.h"
#include "cpu/scratch.h"
#include "plan/kernel_config.h"

namespace flashplan::cpu::FLASHPLAN_ISA {
namespace {

#include "cpu/vec.h"
// After vec.h, which it uses.
#include "cpu/tile_math.h"

FLASHPLAN_INLINE int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }
FLASHPLAN_INLINE int32_t max(int32_t a, int32_t b) { return a > b ? a : b; }

/// The rows of a work tile for one kv head. Packed row r is query token r / group_size of the
/// request and query head r % group_size of the kv head's group.
struct RowBlock {
  const AttentionParams& params;
  RequestInfo request;
  int32_t kv_head;
  int32_t row_begin;
  int32_t num_rows;

  int32_t query(int32_t r) const { return (row_begin + r) / params.group_size; }
  int64_t token(int32_t r) const { return int64_t{request.qo_begin} + query(r); }
  int64_t qo_head(int32_t r) const {
    return int64_t{kv_head} * params.group_size + (row_begin + r) % params.group_size;
  }
  /// Keys that row r sees, within tile [kv_begin, kv_begin + num_keys).
  VisibleRange visible(int32_t r, int32_t kv_begin, int32_t num_keys) const {
    const int64_t position = int64_t{request.kv_len} - request.qo_len + query(r) - kv_begin;
    int64_t begin = 0;
    int64_t end = num_keys;
    if (params.causal && position + 1 < end) end = position + 1;
    if (params.window_left >= 0 && position - params.window_left > begin) {
      begin = position - params.window_left;
    }
    if (begin >= end) return {0, 0};
    return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
  }
};

/// Addresses of consecutive keys (or values) [kv_begin, kv_end) of one request and head.
template <typename Storage>
class KvRows {
 public:
  KvRows(const KvView& view, const PageTable& pages, const RowBlock& rows, int32_t request,
         int32_t kv_begin, int32_t kv_end)
      : view_(view),
        base_(static_cast<const Storage*>(view.data) + rows.kv_head * view.head_stride),
        num_left_(kv_end - kv_begin) {
    if (pages.ids == nullptr) {
      page_size_ = INT32_MAX;
      slot_ = int64_t{rows.request.kv_begin} + kv_begin;
      page_ = base_;
      return;
    }
    page_size_ = pages.page_size;
    ids_ = pages.ids +
           (pages.indptr != nullptr ? pages.indptr[request] : request * pages.row_stride) +
           kv_begin / page_size_;
    slot_ = kv_begin % page_size_;
    page_ = base_ + *ids_ * view_.page_stride;
  }

  const Storage* address() const { return page_ + slot_ * view_.token_stride; }

  /// Moves on by one key, but never past the last: no further page id is read.
  void advance() {
    if (num_left_ <= 1) return;
    --num_left_;
    if (++slot_ < page_size_ || ids_ == nullptr) return;
    slot_ = 0;
    page_ = base_ + *++ids_ * view_.page_stride;
  }

 private:
  const KvView& view_;
  const Storage* base_;
  const Storage* page_ = nullptr;
  const int32_t* ids_ = nullptr;
  int64_t slot_ = 0;
  int32_t page_size_ = 0;
  int32_t num_left_;
};

template <typename KvFormat>
FLASHPLAN_INLINE void convert_row(const typename KvFormat::Storage* from, float* to,
                                  int32_t head_dim) {
  for (int32_t d = 0; d < head_dim; ++d) to[d] = KvFormat::load(from[d]);
  for (int32_t d = head_dim; d < padded(head_dim); ++d) to[d] = 0.0F;
}

/// Converts consecutive rows to float32, tile by tile. The processor's own prefetching stops at
/// page ends, so rows are asked for ahead of their use.
template <typename KvFormat>
class TileLoader {
 public:
  using Rows = KvRows<typename KvFormat::Storage>;

  TileLoader(const Rows& rows, int32_t head_dim) : rows_(rows), ahead_(rows), head_dim_(head_dim) {
    for (int32_t i = 0; i < kRowsAhead; ++i) prefetch_next();
  }

  void load(int32_t num_rows, float* tile) {
    for (int32_t j = 0; j < num_rows; ++j) {
      prefetch_next();
      convert_row<KvFormat>(rows_.address(), tile + int64_t{j} * padded(head_dim_), head_dim_);
      rows_.advance();
    }
  }

 private:
  static constexpr int32_t kRowsAhead = 16;
  static constexpr int32_t kLineBytes = 64;

  void prefetch_next() {
    const auto* row = reinterpret_cast<const char*>(ahead_.address());
    const auto row_bytes = head_dim_ * static_cast<int32_t>(sizeof(typename KvFormat::Storage));
    for (int32_t b = 0; b < row_bytes; b += kLineBytes) __builtin_prefetch(row + b);
    ahead_.advance();
  }

  Rows rows_;
  Rows ahead_;
  int32_t head_dim_;
};

void load_queries(const RowBlock& rows, float* to) {
  const AttentionParams& p = rows.params;
  const int32_t width = padded(p.head_dim_qk);
  dispatch_format(p.q_dtype, [&](auto format) {
    using QFormat = decltype(format);
    for (int32_t r = 0; r < rows.num_rows; ++r) {
      const auto* q = static_cast<const typename QFormat::Storage*>(p.q) +
                      rows.token(r) * p.q_token_stride + rows.qo_head(r) * p.q_head_stride;
      float* row = to + int64_t{r} * width;
      convert_row<QFormat>(q, row, p.head_dim_qk);
      for (int32_t d = 0; d < width; ++d) row[d] *= p.logits_scale;
    }
  });
}

/// Attention of `rows` over keys [kv_begin, kv_end): scratch.o normalised, scratch.lse. Not
/// inlined: one copy of the code gives one result per chunk, whoever runs it.
template <typename KvFormat>
[[gnu::noinline]] void compute_state(const RowBlock& rows, int32_t request, int32_t kv_begin,
                                     int32_t kv_end, const Scratch& scratch) {
  const AttentionParams& p = rows.params;
  const int32_t width_qk = padded(p.head_dim_qk);
  const int32_t width_vo = padded(p.head_dim_vo);
  VisibleRange visible[kCpuTileQ];

  for (int32_t r = 0; r < rows.num_rows; ++r) scratch.row_max[r] = -__builtin_inff();
  for (int32_t i = 0; i < rows.num_rows * kRowPadding; ++i) scratch.row_sum[i] = 0.0F;
  for (int64_t i = 0; i < int64_t{rows.num_rows} * width_vo; ++i) scratch.o[i] = 0.0F;

  if (kv_begin < kv_end) {
    using Rows = KvRows<typename KvFormat::Storage>;
    TileLoader<KvFormat> keys(Rows(p.k, p.pages, rows, request, kv_begin, kv_end), p.head_dim_qk);
    TileLoader<KvFormat> values(Rows(p.v, p.pages, rows, request, kv_begin, kv_end), p.head_dim_vo);
    int32_t num_keys = 0;
    for (int32_t kv = kv_begin; kv < kv_end; kv += num_keys) {  // kv + tile_kv might overflow
      num_keys = min(p.tile_kv, kv_end - kv);
      keys.load(num_keys, scratch.kv);
      compute_logits(scratch.q, rows.num_rows, scratch.kv, num_keys, width_qk, scratch.logits,
                     p.tile_kv);
      for (int32_t r = 0; r < rows.num_rows; ++r) {
        visible[r] = rows.visible(r, kv, num_keys);
        float* o = scratch.o + int64_t{r} * width_vo;
        const float shrink =
            softmax_row(scratch.logits + int64_t{r} * p.tile_kv, num_keys, visible[r], p.softcap,
                        &scratch.row_max[r], scratch.row_sum + int64_t{r} * kRowPadding);
        if (shrink != 1.0F) {
          for (int32_t d = 0; d < width_vo; ++d) o[d] *= shrink;
        }
      }
      values.load(num_keys, scratch.kv);
      add_values(scratch.logits, p.tile_kv, visible, rows.num_rows, scratch.kv, width_vo,
                 scratch.o);
    }
  }
  for (int32_t r = 0; r < rows.num_rows; ++r) {
    if (scratch.row_max[r] == -__builtin_inff()) {  // no visible key: o is still 0
      scratch.lse[r] = -__builtin_inff();
      continue;
    }
    const float total = sum_of_lanes(load(scratch.row_sum + int64_t{r} * kRowPadding));
    const float inverse = 1.0F / total;
    float* o = scratch.o + int64_t{r} * width_vo;
    for (int32_t d = 0; d < width_vo; ++d) o[d] *= inverse;
    scratch.lse[r] = scratch.row_max[r] + __builtin_logf(total);
  }
}

void write_row(const RowBlock& rows, int32_t r, const float* o, float scale, float lse) {
  const AttentionParams& p = rows.params;
  const int64_t token = rows.token(r);
  const int64_t head = rows.qo_head(r);
  dispatch_format(p.o_dtype, [&](auto format) {
    using OFormat = decltype(format);
    auto* out = static_cast<typename OFormat::Storage*>(p.o) + token * p.o_token_stride +
                head * p.o_head_stride;
    for (int32_t d = 0; d < p.head_dim_vo; ++d) out[d] = OFormat::store(o[d] * scale);
  });
  if (p.lse != nullptr) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = lse;
}

void write_state(const RowBlock& rows, const Scratch& scratch) {
  const int32_t width = padded(rows.params.head_dim_vo);
  for (int32_t r = 0; r < rows.num_rows; ++r) {
    write_row(rows, r, scratch.o + int64_t{r} * width, rows.params.v_scale, scratch.lse[r]);
  }
}

void write_partial(const RowBlock& rows, int32_t slot, const Scratch& scratch) {
  const AttentionParams& p = rows.params;
  const int32_t width = padded(p.head_dim_vo);
  const int64_t first_row = int64_t{slot} * p.tile_q;
  for (int32_t r = 0; r < rows.num_rows; ++r) {
    float* to = p.partial_o + (first_row + r) * p.head_dim_vo;
    const float* from = scratch.o + int64_t{r} * width;
    for (int32_t d = 0; d < p.head_dim_vo; ++d) to[d] = from[d];
    p.partial_lse[first_row + r] = scratch.lse[r];
  }
}

/// States merged so far, of all rows.
class Merger {
 public:
  Merger(const RowBlock& rows, const Scratch& scratch) : rows_(rows), scratch_(scratch) {
    const int64_t width = padded(rows.params.head_dim_vo);
    for (int64_t i = 0; i < rows.num_rows * width; ++i) scratch.merged_o[i] = 0.0F;
    for (int32_t r = 0; r < rows.num_rows; ++r) {
      scratch.merged_max[r] = -__builtin_inff();
      scratch.merged_sum[r] = 0.0F;
    }
  }

  void add_row(int32_t r, const float* o, float lse) {
    merge_row(o, lse, rows_.params.head_dim_vo, merged_o(r), &scratch_.merged_max[r],
              &scratch_.merged_sum[r]);
  }

  void write() {
    for (int32_t r = 0; r < rows_.num_rows; ++r) {
      const float total = scratch_.merged_sum[r];
      const bool no_keys = scratch_.merged_max[r] == -__builtin_inff();
      const float scale = no_keys ? 0.0F : rows_.params.v_scale / total;
      const float lse =
          no_keys ? -__builtin_inff() : scratch_.merged_max[r] + __builtin_logf(total);
      write_row(rows_, r, merged_o(r), scale, lse);
    }
  }

 private:
  float* merged_o(int32_t r) const {
    return scratch_.merged_o + int64_t{r} * padded(rows_.params.head_dim_vo);
  }

  const RowBlock& rows_;
  const Scratch& scratch_;
};

/// Merges the partial results of a split in the order of their keys, and writes o and lse.
void merge_partials(const RowBlock& rows, const SplitTile& split, const Scratch& scratch) {
  const AttentionParams& p = rows.params;
  Merger merger(rows, scratch);
  for (int32_t slot = split.slot_begin; slot < split.slot_begin + split.num_slots; ++slot) {
    const int64_t first_row = int64_t{slot} * p.tile_q;
    for (int32_t r = 0; r < rows.num_rows; ++r) {
      merger.add_row(r, p.partial_o + (first_row + r) * p.head_dim_vo,
                     p.partial_lse[first_row + r]);
    }
  }
  merger.write();
}

/// True for the last of a split's pieces to arrive, which then sees what all others wrote.
bool arrives_last(const AttentionParams& p, int32_t split) {
  const int32_t arrived = __atomic_add_fetch(&p.arrivals[split], 1, __ATOMIC_ACQ_REL);
  return arrived == p.splits[split].num_pieces;
}

template <typename KvFormat>
void run_head(const RowBlock& rows, const WorkTile& tile, const Scratch& scratch) {
  const AttentionParams& p = rows.params;
  load_queries(rows, scratch.q);
  if (p.chunk_kv == 0) {
    compute_state<KvFormat>(rows, tile.request, tile.kv_begin, tile.kv_end, scratch);
    if (tile.split < 0) {
      write_state(rows, scratch);
      return;
    }
    write_partial(rows, tile.partial_slot, scratch);
  } else {
    // One state per chunk, merged left to right: the same operations whether the chunks are run
    // here or by several work tiles.
    const int32_t width = padded(p.head_dim_vo);
    Merger merger(rows, scratch);
    int32_t slot = tile.partial_slot;
    int32_t num_keys = 0;
    for (int32_t kv = tile.kv_begin; kv < tile.kv_end; kv += num_keys) {
      num_keys = min(p.chunk_kv, tile.kv_end - kv);
      compute_state<KvFormat>(rows, tile.request, kv, kv + num_keys, scratch);
      if (tile.split >= 0) {
        write_partial(rows, slot++, scratch);
        continue;
      }
      for (int32_t r = 0; r < rows.num_rows; ++r) {
        merger.add_row(r, scratch.o + int64_t{r} * width, scratch.lse[r]);
      }
    }
    if (tile.split < 0) {
      merger.write();
      return;
    }
  }
  if (arrives_last(p, tile.split)) merge_partials(rows, p.splits[tile.split], scratch);
}

template <DType kv_dtype>
void run_queue(const AttentionParams& p, int32_t cta, std::byte* memory) noexcept {
  Scratch scratch;
  partition(&scratch, memory, p.tile_q, p.tile_kv, p.head_dim_qk, p.head_dim_vo);
  for (int32_t i = p.cta_indptr[cta]; i < p.cta_indptr[cta + 1]; ++i) {
    const WorkTile& tile = p.tiles[i];
    const RequestInfo& request = p.requests[tile.request];
    const int32_t row_begin = tile.row_tile * p.tile_q;
    const int32_t num_rows = min(p.tile_q, request.qo_len * p.group_size - row_begin);
    for (int32_t h = tile.kv_head; h < tile.kv_head + tile.num_kv_heads; ++h) {
      const RowBlock rows{p, request, h, row_begin, num_rows};
      run_head<Format<kv_dtype>>(rows, tile, scratch);
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
