// SPDX-License-Identifier: Apache-2.0
// Attention of a work tile of up to 8 rows, such as a decode, over a cache with short rows: few
// bytes for each token and kv head. In a matrix instruction keys are the operand with 16 rows and
// queries the one with 8 columns, so that few products are wasted on padding. Each warp copies its
// own keys and uses no others, and warps wait for each other only at the end of a head.
#pragma once

#include "kernels/device/sm80/few_rows_pipeline.h"
#include "kernels/device/sm80/few_rows_state.h"
#include "kernels/device/sm80/tile_end.h"

namespace flashplan::device {

/// Computes a work tile, kHeads of its kv heads at a time.
template <typename T, int kHeads>
class FewRows {
  using S = FewRowsShape<T, kHeads>;
  using State = FewRowsState<T, kHeads>;

 public:
  FLASHPLAN_DEVICE FewRows(const AttentionParams& p, TileContext& context, unsigned char* smem)
      : p_(p),
        context_(context),
        smem_(smem),
        thread_(thread_index()),
        lane_(thread_ & 31),
        warp_(thread_ >> 5) {}

  /// Computes kv heads [head, heads_end), kHeads at a time. kHeads divides their number.
  FLASHPLAN_DEVICE void run(int32_t head, int32_t heads_end) {
    const int32_t keys_end = context_.block.keys.end;
    FewRowsPipeline<T, kHeads> pipeline(p_, context_, shared_address(smem_), warp_, lane_, head,
                                        heads_end);
    // Page ids take as long to arrive as keys, so they are requested kStages - 1 steps before the
    // keys.
#pragma unroll 1
    for (int i = 0; i < S::kStages - 1; ++i) pipeline.request_ids(i);
    cp_async_commit();
    if (context_.tile.merge >= 0) prepare_merge(p_, context_, thread_);
    State state(p_, context_, lane_);
    state.load_queries(head);  // requested before keys, so that queries do not wait behind keys
    state.reset();
    int32_t key = pipeline.first_key();
    int num_copied = 0;  // how many steps are copied ahead; kStages - 1 when the pipeline is full
    uint32_t stage = 0;  // the stage that the next step is copied to
    cp_async_wait<0>();
#pragma unroll 1
    for (;;) {
      const bool is_full = num_copied == S::kStages - 1;
      // The stage that is read next, if is_full.
      const uint32_t next = stage == S::kStages - 1 ? 0 : stage + 1;
      const uint32_t from = pipeline.stage_address(next);
      typename State::Fragments keys = {};
      if (is_full) {
        cp_async_wait<S::kStages - 2>();
        __syncwarp();  // the next step has arrived for all lanes, and no lane still reads the last
                       // one
        state.load_keys(keys, from);
      }
      pipeline.copy(stage);
      pipeline.request_ids(stage == 0 ? S::kStages - 1 : stage - 1);
      cp_async_commit();
      stage = next;
      if (!is_full) {
        ++num_copied;
        continue;
      }
      if (key < keys_end) state.attend(keys, from, key);
      key += S::kStepKeys;
      if (key < keys_end) continue;
      if (head + kHeads == heads_end) cp_async_wait<0>();  // the record of the merge has arrived
      write(state, head, stage);
      head += kHeads;
      if (head == heads_end) break;
      state.load_queries(head);
      state.reset();
      key = pipeline.first_key();
    }
  }

 private:
  // The functions below find places in the shared memory through which the warps exchange their
  // states at the end of a head.

  /// The byte offset of dim `dim` of row `row` in the stage to which a warp writes its o. The order
  /// of dims differs between pairs of rows, so that a warp's stores have no bank conflicts.
  static FLASHPLAN_DEVICE int offset_of_o(int row, int dim) {
    return (row * S::kOutputPitch + (dim ^ (row / 2 * 8))) * 4;
  }
  FLASHPLAN_DEVICE typename S::State& state_of(int warp) const {
    return reinterpret_cast<typename S::Memory*>(smem_)->states[warp];
  }
  /// The byte offset in shared memory of the stage to which warp `warp` writes its o.
  FLASHPLAN_DEVICE int& stage_of(int warp) const { return state_of(warp).stage; }
  /// The {shift, sum} of row `row` over the keys of warp `warp`.
  FLASHPLAN_DEVICE float2& softmax_of(int warp, int row) const {
    return state_of(warp).softmax[row];
  }

  /// Merges the states of all warps for kHeads kv heads from `first` on, and writes o and lse, or
  /// partial results if the keys are split. `stage`: a stage that this warp reads no more, to which
  /// it writes its o.
  FLASHPLAN_DEVICE void write(const State& state, int32_t first, uint32_t stage) {
    const PackedRows& rows = context_.block.rows;
    const int own_stage = FLASHPLAN_OFFSET_OF(typename S::Memory, stages) +
                          static_cast<int>(warp_ * S::kStages + stage) * S::kStageBytes;
    if (lane_ == 0) stage_of(warp_) = own_stage;
    __syncwarp();  // no lane reads the stage any more
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      share(state, h, own_stage);
      __syncthreads();
      constexpr int kQuads = S::kDims / 4;
#pragma unroll 1
      for (int i = thread_; i < rows.num_rows * kQuads; i += T::kThreads) {
        write_quad(first + h, i / kQuads, i % kQuads * 4);
      }
      __syncthreads();
    }
  }

  /// Stores this warp's {shift, sum} and o of one head in shared memory, for the other warps.
  FLASHPLAN_DEVICE void share(const State& state, int head, int own_stage) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = state.own_row() + j;
      const float2 softmax = state.softmax(head, j);
      if (lane_ < 4) softmax_of(warp_, row) = softmax;
      state.for_each_dim(head, j, [&](int dim, float x) {
        *reinterpret_cast<float*>(smem_ + own_stage + offset_of_o(row, dim)) = x;
      });
    }
  }

  /// Merges 4 dims of a row from what all warps have stored by share(), and writes the result.
  FLASHPLAN_DEVICE void write_quad(int32_t head, int row, int dim) const {
    float shift = softmax_of(0, row).x;
#pragma unroll
    for (int w = 1; w < S::kWarps; ++w) shift = fmaxf(shift, softmax_of(w, row).x);
    float sum = 0.0F;
    float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      const float2 softmax = softmax_of(w, row);
      const float weight = exp2_fast(softmax.x - shift);
      sum = __fmaf_rn(softmax.y, weight, sum);
      o = merge_values(
          o, *reinterpret_cast<const float4*>(smem_ + stage_of(w) + offset_of_o(row, dim)),
          {1.0F, weight});
    }
    const float scale = sum == 0.0F ? 0.0F : reciprocal_fast(sum);
    const float lse = sum == 0.0F ? -infinity() : (shift + log2_fast(sum)) * kLn2;
    const WorkTile& tile = context_.tile;
    // nvcc places the code of the expected branch first, so that it is fetched sooner.
    if (__builtin_expect(static_cast<long>(tile.merge >= 0), 1L) != 0) {
      const int64_t partial_row =
          int64_t{tile.partial_row} + (head - tile.kv_head) * context_.block.rows.num_rows + row;
      *reinterpret_cast<float4*>(p_.workspace.partial_o + partial_row * T::kHeadDimVo + dim) =
          scaled(o, scale);
      if (dim == 0) p_.workspace.partial_lse[partial_row] = lse;
    } else {
      write_result<T>(p_, typename T::Variant(p_), context_.block.rows, head, row, dim, o, scale,
                      lse);
    }
  }

  const AttentionParams& p_;
  TileContext& context_;
  unsigned char* const smem_;
  const int thread_;
  const int lane_;
  const int warp_;
};

/// Runs a work tile of up to 8 rows.
template <typename T>
FLASHPLAN_DEVICE void run_few_rows(const AttentionParams& p, TileContext& context,
                                   unsigned char* smem) {
  const int thread = static_cast<int>(threadIdx.x);
  if (context.block.keys.begin >= context.block.keys.end) {
    finish_without_keys<T>(p, context, thread);
    return;
  }
  const int32_t first = context.tile.kv_head;
  const int32_t end = context.heads_end();
  const int32_t pairs_end = end - (end - first) % 2;
  if (pairs_end > first) FewRows<T, 2>(p, context, smem).run(first, pairs_end);
  if (pairs_end < end) FewRows<T, 1>(p, context, smem).run(pairs_end, end);
  if (context.tile.merge >= 0) arrive_and_merge_few<T>(p, context, thread);
}

}  // namespace flashplan::device
