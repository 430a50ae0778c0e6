// SPDX-License-Identifier: Apache-2.0
// Writes the states of a work tile from registers to memory.
#pragma once

#include "kernels/device/sm80/merge_partials.h"
#include "kernels/device/sm80/softmax.h"
#include "kernels/device/sm80/tile_context.h"
#include "kernels/device/sm80/warp_mma.h"

namespace flashplan::device {

/// Writes the state of a chunk of keys to memory. A chunk is all keys of the tile, except in
/// batch-invariant plans: there the state of each chunk is computed on its own, and states are
/// merged left to right.
template <typename T, typename S>
class Epilogue {
 public:
  using Accumulators = float[S::kMmaM][S::kDimsVo / 8][4];

  /// Warps exchange results in the memory of pipeline stage `stage`, once all warps have read the
  /// stage.
  FLASHPLAN_DEVICE Epilogue(const AttentionParams& p, const TileContext& context,
                            unsigned char* smem, int thread, int stage, int head, int chunk,
                            bool is_last_chunk)
      : p_(p),
        context_(context),
        block_(context.block),
        variant_(p),
        thread_(thread),
        at_(opaque(thread)),
        memory_(reinterpret_cast<float*>(smem + S::kFirstStage + stage * S::kStageBytes)),
        stats_(reinterpret_cast<typename S::Header*>(smem)->stats[0]),
        head_(head),
        chunk_(chunk),
        is_last_chunk_(is_last_chunk) {}

  FLASHPLAN_DEVICE void write(const OnlineSoftmax<S::kMmaM>& softmax, Accumulators& o) {
    if constexpr (S::kWarpsKv == 1) {
      if (is_split()) {
        if (at_.computes) write_partial(softmax, o);
        return;
      }
      if (p_.schedule.chunk_kv == 0 && p_.tensors.vectorized &&
          o_dtype<typename T::Variant>(p_) == T::kOutput && p_.tensors.head_dim_vo % 16 == 0) {
        if (at_.computes) write_result(softmax, o);
        return;
      }
    }
    __syncthreads();  // all warps have read the stage
    share_and_write(softmax, o);
  }

 private:
  static constexpr int kQuads = T::kHeadDimVo / 4;
  // A row goes through shared memory in kParts passes, of kOutputDims dims each.
  static constexpr int kParts = S::kDimsVo / S::kOutputDims;

  /// The first of this lane's dims, counted from the first dim of the warp.
  FLASHPLAN_DEVICE int lane_dim() const { return ValueLayout<T::kKv>::first_dim(at_.lane); }
  FLASHPLAN_DEVICE int own_dim() const { return at_.first_dim() + lane_dim(); }
  /// Whether this lane writes the log-sum-exp of its rows.
  FLASHPLAN_DEVICE bool writes_lse() const { return at_.lane % 4 == 0 && at_.warp_vo == 0; }
  FLASHPLAN_DEVICE bool is_split() const { return context_.tile.merge >= 0; }
  /// The index of row `row` of this tile among the partial rows in the workspace.
  FLASHPLAN_DEVICE int64_t partial_row(int row) const {
    const WorkTile& tile = context_.tile;
    return int64_t{tile.partial_row} + (head_ - tile.kv_head) * block_.rows.num_rows +
           chunk_ * T::kTileQ + row;
  }
  FLASHPLAN_DEVICE float inverse(float sum) const {
    return !T::Variant::kUseSoftmax ? 1.0F : sum == 0.0F ? 0.0F : reciprocal_fast(sum);
  }
  FLASHPLAN_DEVICE float lse(float shift, float sum) const {
    return sum == 0.0F ? -infinity() : (shift + log2_fast(sum)) * kLn2;
  }

  /// Calls f(m, half, row) for the rows of this lane.
  template <typename Function>
  FLASHPLAN_DEVICE void for_each_row(Function f) const {
#pragma unroll
    for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = at_.row(m, half);
        if (row >= block_.rows.num_rows) return;
        f(m, half, row);
      }
    }
  }

  /// Writes partial results directly from registers.
  FLASHPLAN_DEVICE void write_partial(const OnlineSoftmax<S::kMmaM>& softmax, Accumulators& o) {
    for_each_row([&](int m, int half, int row) {
      const float sum = softmax.sum[m][half];
      const float scale = inverse(sum);
      float* to = p_.workspace.partial_o + partial_row(row) * T::kHeadDimVo + own_dim();
      if (writes_lse()) {
        p_.workspace.partial_lse[partial_row(row)] = lse(softmax.shift[m][half], sum);
      }
      ValueLayout<T::kKv>::for_each_pair(o[m], half, S::kDimsVo, [&](int d, float x, float y) {
        *reinterpret_cast<float2*>(to + d) = {x * scale, y * scale};
      });
    });
  }

  /// Writes final results directly from registers. Only for o of dtype T::kOutput with a multiple
  /// of 16 dims.
  FLASHPLAN_DEVICE void write_result(const OnlineSoftmax<S::kMmaM>& softmax, Accumulators& o) {
    // The addresses and scales of all rows are computed before the first write. If they were
    // computed row by row between the writes, this would take as long as the writes themselves.
    int64_t out[S::kMmaM][2];
    float scale[S::kMmaM][2];
    float row_lse[S::kMmaM][2];
    const float values_scale = v_scale(p_, head_);
#pragma unroll
    for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(at_.row(m, half), block_.rows.num_rows - 1);
        const OutputRow to(p_, block_.rows, head_, row);
        out[m][half] = to.o(p_) + own_dim();
        scale[m][half] = inverse(softmax.sum[m][half]);
        row_lse[m][half] = lse(softmax.shift[m][half], softmax.sum[m][half]);
        if constexpr (T::Variant::kUseSoftmax) {
          add_sink(p_, to.head, scale[m][half], row_lse[m][half]);
        }
        scale[m][half] *= values_scale;
      }
    }
    for_each_row([&](int m, int half, int row) {
      if (writes_lse() && p_.tensors.lse.data != nullptr) {
        OutputRow(p_, block_.rows, head_, row).write_lse(p_, row_lse[m][half]);
      }
      uint16_t* const to = static_cast<uint16_t*>(p_.tensors.o.data) + out[m][half];
      const int num_dims = p_.tensors.head_dim_vo - at_.first_dim();
      ValueLayout<T::kKv>::for_each_pair(o[m], half, num_dims, [&](int d, float x, float y) {
        x *= scale[m][half];
        y *= scale[m][half];
        if constexpr (T::Variant::kTransformsOutput) {
          const ElementPosition at =
              element_position(p_, block_.rows, block_.position, head_, row, own_dim() + d);
          x = variant_.output(x, at);
          y = variant_.output(y, at.next(1));
        }
        *reinterpret_cast<uint32_t*>(to + d) = Element<T::kOutput>::pack(x, y);
      });
    });
  }

  /// The index in shared memory of dim `dim` of row `r` (0 to 7). The order of groups of 4 dims
  /// differs from row to row, so that the pairs that four rows write at once lie in different
  /// banks.
  static FLASHPLAN_DEVICE int shared_index(int r, int dim) {
    return r * S::kOutputDims + ((dim / 4 ^ r * 2) & 7) * 4 + dim / 32 * 32 + dim % 4;
  }

  /// Writes partial or final results through shared memory: 8 rows of each warp at a time, and as
  /// many dims of these rows as there is room for. The states of warps that took different keys are
  /// merged there.
  FLASHPLAN_DEVICE void share_and_write(const OnlineSoftmax<S::kMmaM>& softmax, Accumulators& o) {
    constexpr bool kAlone = S::kWarpsKv == 1;  // each warp writes its own rows
    constexpr int kSharedQuads = S::kOutputDims / 4;
    constexpr int kPasses = 2 * S::kMmaM * kParts;
    if (kAlone && !at_.computes) return;
    const int index = kAlone ? at_.lane : thread_;
    const int own_rows = kAlone ? at_.first_row() : 0;
#pragma unroll 1
    for (int pass = 0; own_rows + pass / kParts * 8 < block_.rows.num_rows && pass < kPasses;
         ++pass) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        if (pass == i && at_.computes) {
          share(softmax, o, i / kParts / 2, i / kParts % 2, i % kParts * S::kOutputDims);
        }
      }
      kAlone ? __syncwarp() : __syncthreads();
#pragma unroll 1
      for (int i = index; i < (kAlone ? 1 : S::kWarpsQ) * 8 * kSharedQuads;
           i += kAlone ? 32 : T::kThreads) {
        const int warp_q = kAlone ? at_.warp_q : i / (8 * kSharedQuads);
        const int r = i / kSharedQuads % 8;
        const int row = warp_q * S::kMmaM * 16 + pass / kParts * 8 + r;
        const int dim = i % kSharedQuads * 4;
        if (row < block_.rows.num_rows) {
          write_shared(warp_q, r, row, dim, at_.first_dim() + pass % kParts * S::kOutputDims + dim);
        }
      }
      kAlone ? __syncwarp() : __syncthreads();
    }
  }

  /// The index in memory_ and stats_ of the warp (warp_q, warp_kv) that has the same dims as this
  /// warp.
  FLASHPLAN_DEVICE int warp_index(int warp_q, int warp_kv) const {
    return (warp_q * S::kWarpsVo + at_.warp_vo) * S::kWarpsKv + warp_kv;
  }
  FLASHPLAN_DEVICE float* shared_o(int warp_q, int warp_kv) const {
    return memory_ + warp_index(warp_q, warp_kv) * 8 * S::kOutputDims;
  }
  FLASHPLAN_DEVICE float2* shared_stats(int warp_q, int warp_kv) const {
    return stats_ + warp_index(warp_q, warp_kv) * 8;
  }

  /// Writes S::kOutputDims dims, from `first` on, to shared memory.
  FLASHPLAN_DEVICE void share(const OnlineSoftmax<S::kMmaM>& softmax, Accumulators& o, int m,
                              int half, int first) const {
    const int r = at_.lane / 4;
    if (at_.row(m, half) >= block_.rows.num_rows) return;
    if (at_.lane % 4 == 0) {
      shared_stats(at_.warp_q, at_.warp_kv)[r] = {softmax.shift[m][half], softmax.sum[m][half]};
    }
    float* memory = shared_o(at_.warp_q, at_.warp_kv);
    ValueLayout<T::kKv>::for_each_pair(o[m], half, S::kDimsVo, [&](int d, float x, float y) {
      if (d / S::kOutputDims * S::kOutputDims != first) return;
      *reinterpret_cast<float2*>(memory + shared_index(r, lane_dim() + d - first)) = {x, y};
    });
  }

  /// Merges the warps' states of row `row` in dims [dim, dim + 4). In shared memory these are the
  /// dims from `shared_dim` on of row `r`. Writes the merged dims as partial or final results, or
  /// merges them into the state of the chunks before this one.
  FLASHPLAN_DEVICE void write_shared(int warp_q, int r, int row, int shared_dim, int dim) const {
    float shift = shared_stats(warp_q, 0)[r].x;
#pragma unroll
    for (int w = 1; w < S::kWarpsKv; ++w) shift = fmaxf(shift, shared_stats(warp_q, w)[r].x);
    float sum = 0.0F;
    float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int w = 0; w < S::kWarpsKv; ++w) {
      const float2 stats = shared_stats(warp_q, w)[r];
      const float weight = T::Variant::kUseSoftmax ? exp2_fast(stats.x - shift) : 1.0F;
      sum = __fmaf_rn(stats.y, weight, sum);
      o = merge_values(
          o, *reinterpret_cast<const float4*>(shared_o(warp_q, w) + shared_index(r, shared_dim)),
          {1.0F, weight});
    }
    const float scale = inverse(sum);
    const float row_lse = lse(shift, sum);
    if (is_split()) {
      *reinterpret_cast<float4*>(p_.workspace.partial_o + partial_row(row) * T::kHeadDimVo + dim) =
          scaled(o, scale);
      if (dim == 0) p_.workspace.partial_lse[partial_row(row)] = row_lse;
    } else if (T::Variant::kHasChunks && p_.schedule.chunk_kv > 0) {
      merge_chunk(scaled(o, scale), row, dim, row_lse);
    } else {
      device::write_result<T>(p_, variant_, block_.rows, head_, row, dim, o, scale, row_lse);
    }
  }

  /// Merges 4 dims of a chunk's state into those of the chunks before it, and writes the result
  /// after the last chunk.
  FLASHPLAN_DEVICE void merge_chunk(float4 o, int row, int dim, float row_lse) const {
    // The thread that merges 4 dims of one chunk merges the same dims of every chunk.
    const int quad = row * kQuads + dim / 4;
    float4* merged_o = scratch<float4>() + quad;
    MergedRow* merged_row = scratch<MergedRow>(T::kTileQ * T::kHeadDimVo * 4) + quad;
    MergedRow merged;
    merged.reset();
    float4 so_far = {0.0F, 0.0F, 0.0F, 0.0F};
    if (chunk_ > 0) {
      merged = *merged_row;
      so_far = *merged_o;
    }
    o = merge_values(so_far, o, T::Variant::kUseSoftmax ? merged.add(row_lse) : kSum);
    if (!is_last_chunk_) {
      *merged_o = o;
      *merged_row = merged;
      return;
    }
    device::write_result<T>(p_, variant_, block_.rows, head_, row, dim, o,
                            T::Variant::kUseSoftmax ? merged.inverse() : 1.0F, merged.lse());
  }

  /// This CTA's part of the scratch memory, from `offset` bytes on.
  template <typename U>
  FLASHPLAN_DEVICE U* scratch(int offset = 0) const {
    return reinterpret_cast<U*>(static_cast<unsigned char*>(p_.workspace.scratch) +
                                blockIdx.x * p_.workspace.scratch_bytes + offset);
  }

  const AttentionParams& p_;
  const TileContext& context_;
  const RowBlock& block_;
  const typename T::Variant variant_;
  const int thread_;
  const WarpPlace<S> at_;
  float* const memory_;  // [kWarpsQ][kWarpsVo][kWarpsKv][8][S::kOutputDims]
  float2* const stats_;  // (shift, sum) of rows: [kWarpsQ][kWarpsVo][kWarpsKv][8]
  const int head_;
  const int chunk_;
  const bool is_last_chunk_;
};

}  // namespace flashplan::device
