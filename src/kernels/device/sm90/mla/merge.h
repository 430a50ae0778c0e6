// SPDX-License-Identifier: Apache-2.0
// Merges of partial results by the consumers of the sm90_mla family.
#pragma once

#include "kernels/device/attention_state.h"
#include "kernels/device/merge_part.h"
#include "kernels/device/sm90/mla/shared_memory.h"
#include "kernels/device/write_result.h"

namespace flashplan::device {

template <typename S>
struct MlaMerge {
  /// Arrives at a merge, for a tile whose partial results both warpgroups have written. One thread
  /// calls it, behind a barrier of all consumers. The rows that this CTA then has to merge wait in
  /// its list for merge_waiting(). `is_final`: no tiles are left to compute.
  static FLASHPLAN_DEVICE void arrive(const AttentionParams& p, const MlaSmem<S>& smem,
                                      int32_t number, bool is_final) {
    Merge merge = p.schedule.merges[number];
    int32_t* counter = counter_of(p, number);
    if constexpr (S::kPairs) {
      // Each CTA of a pair merges its own rows, together with the CTAs of other queues that have
      // the same rows.
      const int32_t first_row = first_row_of_cta<S>();
      merge.rows.row_begin += first_row;
      merge.rows.num_rows = min(max(merge.rows.num_rows - first_row, 0), S::kTileQ);
      merge.first_partial_row += first_row;
      if (merge.rows.num_rows == 0) return;
      counter += cluster_rank();
    }
    const uint32_t count = load_shared_4(smem.num_waiting());
    const MergePart part = arrive_at_merge(counter, merge, is_final && count == 0, kFewRows);
    if (part.count == 0) return;
    store_shared_4(smem.num_waiting(), count + 1);
    const int32_t num_rows = merge.rows.num_rows;
    smem.memory.waiting[count] = {merge, part.begin(num_rows), part.end(num_rows)};
  }

  /// Merges the rows that arrive() has put into the list. All consumers call it after their last
  /// tile. A warp merges a row, or a quarter of a row's dims where there are few rows.
  static FLASHPLAN_DEVICE void merge_waiting(const AttentionParams& p, const MlaSmem<S>& smem,
                                             int thread) {
    barrier_wait(S::kConsumerBarrier, S::kConsumerThreads);
    const uint32_t count = load_shared_4(smem.num_waiting());
    const int warp = thread / 32;
    const int lane = thread % 32;
#pragma unroll 1
    for (uint32_t n = 0; n < count; ++n) {
      const MlaWaitingMerge& waiting = smem.memory.waiting[n];
      const Merge& merge = waiting.merge;
      const int32_t begin = waiting.begin;
      const int32_t end = waiting.end;
      if ((end - begin) * kQuarters <= 2 * S::kConsumerWarps) {
#pragma unroll 1
        for (int i = warp; i < (end - begin) * kQuarters; i += S::kConsumerWarps) {
          merge_dims<1>(p, merge, begin + i / kQuarters, i % kQuarters * 128 + lane * 4, lane);
        }
      } else {
#pragma unroll 1
        for (int row = begin + warp; row < end; row += S::kConsumerWarps) {
          merge_dims<kQuarters>(p, merge, row, lane * 4, lane);
        }
      }
    }
  }

 private:
  static constexpr int32_t kFewRows = 4;  // up to this many rows are merged by the last CTA alone
  static constexpr int kQuarters = S::kHeadDimVo / 128;
  static constexpr int64_t kStateRows = S::kRowsOfTile;

  /// Merges `kQuads` times 4 dims of a row in each lane, from `dim` on in steps of 128. Each lane
  /// computes the factors of one state. All lanes then exchange them, and each adds up its own dims
  /// of all states. In batch-invariant plans states are merged one after the other, as MlaEpilogue
  /// merges the chunks of a tile.
  template <int kQuads>
  static FLASHPLAN_DEVICE void merge_dims(const AttentionParams& p, const Merge& merge, int row,
                                          int dim, int lane) {
    constexpr int kStatesAtOnce = 16 / kQuads;  // loads in flight hide the latency of memory
    MergedRow merged;
    merged.reset();
    float4 o[kQuads];
#pragma unroll
    for (float4& quad : o) quad = {0.0F, 0.0F, 0.0F, 0.0F};
    const int64_t first_row = int64_t{merge.first_partial_row} + row;
#pragma unroll 1
    for (int first = 0; first < merge.num_states; first += 32) {
      const int count = min(merge.num_states - first, 32);
      const int64_t from = first_row + first * kStateRows;
      const float lse =
          load_if(lane < count, p.workspace.partial_lse + from + lane * kStateRows, -infinity());
      float2 own = {1.0F, 0.0F};  // for merge_values(): the factors of o so far and of the state
#pragma unroll 1
      for (int n = 0; n < count; n += kStatesAtOnce) {
        const float* states = p.workspace.partial_o + (from + n * kStateRows) * S::kHeadDimVo + dim;
        float4 added[kStatesAtOnce][kQuads];
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
#pragma unroll
          for (int q = 0; q < kQuads; ++q) {
            added[i][q] =
                load_4_if(n + i < count, states + i * kStateRows * S::kHeadDimVo + q * 128, 0.0F);
          }
        }
        // lse is used only here, so that it is loaded together with the values.
        if (n == 0) own = add_states(p, merged, lse, count, lane);
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
          // A state without keys has the weight 0, and o = 0.
          const float2 factors = {__shfl_sync(0xffffffffU, own.x, n + i),
                                  __shfl_sync(0xffffffffU, own.y, n + i)};
          if (n + i >= count) continue;
#pragma unroll
          for (int q = 0; q < kQuads; ++q) o[q] = merge_values(o[q], added[i][q], factors);
        }
      }
    }
    // One copy of the code writes all quads, which move to o[0] one after the other.
#pragma unroll 1
    for (int q = 0; q < kQuads; ++q) {
      write_result<S>(p, typename S::Variant(p), merge.rows, merge.kv_head, row, dim + q * 128,
                      o[0], merged.inverse(), merged.lse());
#pragma unroll
      for (int i = 1; i < kQuads; ++i) o[i - 1] = o[i];
    }
  }

  /// Adds the states of lanes 0 to count - 1, each with the lane's `lse`, to `merged`. Returns two
  /// factors for merge_values(): that of the o merged before the lane's state, and the state's.
  static FLASHPLAN_DEVICE float2 add_states(const AttentionParams& p, MergedRow& merged, float lse,
                                            int count, int lane) {
    float2 own = {1.0F, 0.0F};
    if (p.schedule.chunk_kv == 0) {
      const float shrink = merged.add_of_lanes(lse, &own.y);
      if (lane == 0) own.x = shrink;
      return own;
    }
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const float2 factors = merged.add(__shfl_sync(0xffffffffU, lse, n));
      if (lane == n) own = factors;
    }
    return own;
  }
};

}  // namespace flashplan::device
