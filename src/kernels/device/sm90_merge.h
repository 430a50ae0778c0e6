// SPDX-License-Identifier: Apache-2.0
// Merges of partial results by a consumer warpgroup of the sm90 family.
#pragma once

#include "kernels/device/sm90_reader_merges.h"

namespace flashplan::device {

/// All functions are inlined: see Sm90Epilogue.
template <typename S>
class Sm90Merge {
 public:
  /// The warpgroup's partial results are those of the 64 rows of its tile from `first_row` on.
  FLASHPLAN_DEVICE Sm90Merge(const AttentionParams& p, uint32_t base, int warpgroup, int first_row,
                             int thread)
      : p_(p),
        output_(p),
        base_(base),
        warpgroup_(warpgroup),
        first_row_(first_row),
        thread_(thread) {}

  /// Arrives at a merge, and merges if this warpgroup is the last. As a rule the rows of each
  /// warpgroup are merged apart, with an arrival counter of their own. The merge of a request that
  /// reads prefixes is only noted: Sm90ReaderMerges arrives at it when the queue has ended.
  FLASHPLAN_DEVICE void arrive_at(int32_t number) const {
    const Merge merge = p_.schedule.merges[number];  // loaded while the others arrive
    const bool is_prefix = S::Variant::kIsBuiltIn && merge.num_readers > 0;
    if (S::Variant::kIsBuiltIn && !is_prefix && merge.parent >= 0) {
      // Once for a tile, of which a second warpgroup may have rows, too.
      if (thread_ == 0 && first_row_ == 0) Sm90ReaderMerges<S>(p_, base_).defer(number);
      return;
    }
    const int id = S::kOwnBarrier + warpgroup_;
    barrier_wait(id, 128);
    if (thread_ == 0) {
      // Each warpgroup that shares the tile of a prefix arrives, at one counter.
      const int32_t of_piece = is_prefix && merge.rows.num_rows > 64 ? S::kWarpgroups : 1;
      int32_t* counter = counter_of(p_, number) + (is_prefix ? 0 : first_row_ / 64);
      store_shared_4(flag(), is_last_to_arrive(counter, merge.num_pieces * of_piece));
    }
    barrier_wait(id, 128);
    if (load_shared_4(flag()) == 0) return;
    if (is_prefix) {
      Sm90ReaderMerges<S>(p_, base_).arrive_at_readers(merge, thread_);
    } else {
      merge_states(merge);
    }
  }

 private:
  FLASHPLAN_DEVICE uint32_t flag() const { return base_ + S::kFlags + warpgroup_ * 4; }

  /// Merges this warpgroup's rows. Few rows have a separate function with little code: where a
  /// launch ends with a merge, it mostly waits for instructions that no cache has yet.
  FLASHPLAN_DEVICE void merge_states(const Merge& merge) const {
    constexpr int kFewRows = 16;
    if constexpr (!S::Variant::kIsBuiltIn) {
      merge_few_rows(merge, first_row_, min(merge.rows.num_rows, first_row_ + 64));
    } else if (merge.rows.num_rows <= kFewRows) {
      merge_few_rows(merge, 0, merge.rows.num_rows);
    } else {
      merge_many_rows(merge);
    }
  }

  /// Merges rows [begin, end). A warp merges a row: each lane computes the weight of one state,
  /// then adds 4 dims of all states.
  FLASHPLAN_DEVICE void merge_few_rows(const Merge& merge, int begin, int end) const {
    constexpr int kQuads = S::kHeadDimVo / 4;
    constexpr int kQuadsOfLane = kQuads > 32 ? kQuads / 32 : 1;
    // Loads in flight hide the latency of memory.
    constexpr int kStatesAtOnce = !S::Variant::kIsBuiltIn ? 4
                                  : S::kWarpgroups > 2    ? 6
                                                          : 16 / kQuadsOfLane;
    const int lane = thread_ % 32;
    constexpr int64_t kStateRows = S::kTileQ;
#pragma unroll 1
    for (int row = begin + thread_ / 32; row < end; row += 4) {
      MergedRow merged;
      merged.reset();
      float4 o[kQuadsOfLane];
#pragma unroll
      for (float4& quad : o) quad = {0.0F, 0.0F, 0.0F, 0.0F};
      const int64_t first_row = int64_t{merge.first_partial_row} + row;
#pragma unroll 1
      for (int first = 0; first < merge.num_states; first += 32) {
        const int count = min(merge.num_states - first, 32);
        const int64_t from = first_row + first * kStateRows;
        const float lse =
            load_if(lane < count, p_.workspace.partial_lse + from + lane * kStateRows, -infinity());
        float weight = 1.0F;
#pragma unroll 1
        for (int n = 0; n < count; n += kStatesAtOnce) {
          const float* states = p_.workspace.partial_o + (from + n * kStateRows) * S::kHeadDimVo;
          float4 added[kStatesAtOnce][kQuadsOfLane];
#pragma unroll
          for (int i = 0; i < kStatesAtOnce; ++i) {
#pragma unroll
            for (int q = 0; q < kQuadsOfLane; ++q) {
              const int dim = (q * 32 + lane) % kQuads * 4;
              added[i][q] =
                  load_4_if(n + i < count, states + i * kStateRows * S::kHeadDimVo + dim, 0.0F);
            }
          }
          if (S::Variant::kUseSoftmax && n == 0) {  // here, so that lse arrives with the values
            const float shrink = merged.add_of_lanes(lse, &weight);
#pragma unroll
            for (float4& quad : o) quad = scaled(quad, shrink);
          }
#pragma unroll
          for (int i = 0; i < kStatesAtOnce; ++i) {
            const float of_state = __shfl_sync(0xffffffffU, weight, n + i);
#pragma unroll
            for (int q = 0; q < kQuadsOfLane; ++q) {
              o[q] = merge_values(o[q], added[i][q], {1.0F, of_state});
            }
          }
        }
      }
#pragma unroll
      for (int q = 0; q < kQuadsOfLane; ++q) {
        if (lane < kQuads) {
          output_.write_four(merge.rows, merge.kv_head, row, (q * 32 + lane) * 4,
                             S::Variant::kUseSoftmax ? scaled(o[q], merged.inverse()) : o[q],
                             merged.lse());
        }
      }
    }
  }

  /// A thread merges 4 dims of kAtOnce rows at a time, and adds states in the order of their keys.
  FLASHPLAN_DEVICE void merge_many_rows(const Merge& merge) const {
    constexpr int kAtOnce = S::kHeadDimVo > 128 ? 2 : 4;
    const PackedRows& rows = merge.rows;
    constexpr int kQuads = S::kHeadDimVo / 4;
    constexpr int kRowStep = 128 / kQuads;
    const int num_rows = min(rows.num_rows - first_row_, 64);
    const int dim = thread_ % kQuads * 4;
#pragma unroll 1
    for (int first = thread_ / kQuads; first < num_rows; first += kAtOnce * kRowStep) {
      MergedRow merged[kAtOnce];
      float4 o[kAtOnce];
      int64_t from[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = min(first + i * kRowStep, num_rows - 1);
        from[i] = int64_t{merge.first_partial_row} + first_row_ + r;
        merged[i].reset();
        o[i] = {0.0F, 0.0F, 0.0F, 0.0F};
      }
#pragma unroll 1
      for (int n = 0; n < merge.num_states; ++n) {
        float lse[kAtOnce];
        float4 added[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          lse[i] = load_if(true, p_.workspace.partial_lse + from[i], 0.0F);
          added[i] = load_4_if(true, p_.workspace.partial_o + from[i] * S::kHeadDimVo + dim, 0.0F);
          from[i] += p_.schedule.tile_q;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          o[i] = merge_values(o[i], added[i], merged[i].add(lse[i]));
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = first + i * kRowStep;
        if (r < num_rows) {
          output_.write_four(rows, merge.kv_head, first_row_ + r, dim,
                             scaled(o[i], merged[i].inverse()), merged[i].lse());
        }
      }
    }
  }

  const AttentionParams& p_;
  const Sm90Output<S> output_;
  const uint32_t base_;
  const int warpgroup_;
  const int first_row_;
  const int thread_;
};

}  // namespace flashplan::device
