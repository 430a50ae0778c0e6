// SPDX-License-Identifier: Apache-2.0
// Merges of partial results by a consumer warpgroup of the sm90 family.
#pragma once

#include "kernels/device/attention_state.h"
#include "kernels/device/hopper.h"
#include "kernels/device/merge_part.h"
#include "kernels/device/sm90_reader_merges.h"
#include "kernels/device/write_result.h"

namespace flashplan::device {

/// arrive_at() is inlined: see Sm90Epilogue.
template <typename S>
class Sm90Merge {
 public:
  /// The warpgroup's partial results are those of the 64 rows of its tile from `first_row` on.
  FLASHPLAN_DEVICE Sm90Merge(const AttentionParams& p, uint32_t base, int warpgroup, int first_row,
                             int thread)
      : p_(p), base_(base), warpgroup_(warpgroup), first_row_(first_row), thread_(thread) {}

  /// Clears the lists of waiting merges. One thread calls it, before the first barrier of the CTA.
  static FLASHPLAN_DEVICE void begin(uint32_t base) {
    for (int i = 0; i < S::kWarpgroups; ++i) store_shared_4(list_of(base, i), 0);
  }

  /// Arrives at a merge. The rows that this warpgroup then has to merge wait in its list for
  /// merge_waiting(). Each warpgroup of a tile has an arrival counter for its own rows; only a
  /// prefix has one counter for all rows. `is_final`: no tiles are left to compute. A request that
  /// reads prefixes is only put into the list of Sm90ReaderMerges, which arrives at its merge when
  /// the queue has ended.
  FLASHPLAN_DEVICE void arrive_at(int32_t number, bool is_final) const {
    const Merge merge = p_.schedule.merges[number];  // loaded while the others arrive
    const bool is_prefix = S::Variant::kIsBuiltIn && merge.num_readers > 0;
    if (S::Variant::kIsBuiltIn && !is_prefix && merge.parent >= 0) {
      // Once for a tile, of which a second warpgroup may have rows, too.
      if (thread_ == 0 && first_row_ == 0) Sm90ReaderMerges<S>(p_, base_).defer(number);
      return;
    }
    const int id = S::kOwnBarrier + warpgroup_;
    barrier_wait(id, 128);
    if (is_prefix) {
      if (thread_ == 0) {
        // Each warpgroup that shares the tile of a prefix arrives, at one counter.
        const int32_t of_piece = merge.rows.num_rows > 64 ? S::kWarpgroups : 1;
        const bool is_last = is_last_to_arrive(counter_of(p_, number), merge.num_pieces * of_piece);
        store_shared_4(list() + kIsLast, is_last ? 1 : 0);
      }
      barrier_wait(id, 128);
      if (load_shared_4(list() + kIsLast) == 0) return;
      Sm90ReaderMerges<S>(p_, base_).arrive_at_readers(merge, thread_);
    } else if (thread_ == 0) {
      const uint32_t count = load_shared_4(list());
      const bool has_time = is_final && count == 0;
      const MergePart part =
          arrive_at_merge(counter_of(p_, number) + first_row_ / 64, merge, has_time);
      if (part.count == 0) return;
      store_shared_4(list(), count + 1);
      store_shared_16(list() + (count + 1) * 16,
                      {static_cast<uint32_t>(part.index), static_cast<uint32_t>(part.count),
                       static_cast<uint32_t>(number), static_cast<uint32_t>(first_row_)});
    }
  }

  /// Merges what arrive_at() has left. All threads of a warpgroup call it after their last tile.
  /// Merging right after a tile would put its code among that of tiles, out of the first 64 KB, and
  /// would make the compiler spill the products' registers.
  static FLASHPLAN_DEVICE void merge_waiting(const AttentionParams& p, uint32_t base, int warpgroup,
                                             int thread) {
    barrier_wait(S::kOwnBarrier + warpgroup, 128);
    const uint32_t list = list_of(base, warpgroup);
    const uint32_t count = load_shared_4(list);
#pragma unroll 1
    for (uint32_t i = 1; i <= count; ++i) {
      const uint4 words = load_shared_16(list + i * 16);
      const MergePart part = {static_cast<int32_t>(words.x), static_cast<int32_t>(words.y)};
      Sm90Merge(p, base, warpgroup, static_cast<int>(words.w), thread)
          .merge_states(p.schedule.merges[words.z], part);
    }
  }

 private:
  // The list of a warpgroup: 16 bytes with the number of entries and, at kIsLast, whether the
  // warpgroup was the last to arrive at a prefix; then 16 for each entry: {index and count of the
  // part, number of the merge, first row of the warpgroup}.
  static constexpr int kIsLast = 4;
  static FLASHPLAN_DEVICE uint32_t list_of(uint32_t base, int warpgroup) {
    return base + S::kWaitingMerges + warpgroup * 16 * (1 + kMostSplitsPerQueue);
  }
  FLASHPLAN_DEVICE uint32_t list() const { return list_of(base_, warpgroup_); }

  /// Merges a part of this warpgroup's rows. Few rows have a separate function with little code:
  /// where a launch ends with a merge, it mostly waits for instructions that no cache has yet.
  FLASHPLAN_DEVICE void merge_states(const Merge& merge, const MergePart& part) const {
    const int32_t num_rows = min(merge.rows.num_rows - first_row_, 64);
    const int32_t begin = first_row_ + part.begin(num_rows);
    const int32_t end = first_row_ + part.end(num_rows);
    if (!S::Variant::kIsBuiltIn || !may_divide(merge)) {
      merge_few_rows(merge, begin, end);
    } else {
      merge_many_rows(merge, begin, end);
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
          write_result<S>(p_, typename S::Variant(p_), merge.rows, merge.kv_head, row,
                          (q * 32 + lane) * 4, o[q],
                          S::Variant::kUseSoftmax ? merged.inverse() : 1.0F, merged.lse());
        }
      }
    }
  }

  /// Merges rows [begin, end). A thread merges 4 dims of kAtOnce rows at a time, and adds states in
  /// the order of their keys, kStatesAtOnce at a time.
  FLASHPLAN_DEVICE void merge_many_rows(const Merge& merge, int begin, int end) const {
    constexpr int kAtOnce = S::kHeadDimVo > 128 || S::kWarpgroups > 2 ? 2 : 4;
    constexpr int kStatesAtOnce = 3;
    constexpr int kQuads = S::kHeadDimVo / 4;
    constexpr int kRowStep = 128 / kQuads;
    const int dim = thread_ % kQuads * 4;
#pragma unroll 1
    for (int first = begin + thread_ / kQuads; first < end; first += kAtOnce * kRowStep) {
      MergedRow merged[kAtOnce];
      float4 o[kAtOnce];
      int64_t from[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        from[i] = int64_t{merge.first_partial_row} + min(first + i * kRowStep, end - 1);
        merged[i].reset();
        o[i] = {0.0F, 0.0F, 0.0F, 0.0F};
      }
#pragma unroll 1
      for (int left = merge.num_states; left > 0; left -= kStatesAtOnce) {
        float lse[kAtOnce][kStatesAtOnce];
        float4 added[kAtOnce][kStatesAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
          for (int n = 0; n < kStatesAtOnce; ++n) {
            const int64_t state = from[i] + n * p_.schedule.tile_q;
            lse[i][n] = load_if(n < left, p_.workspace.partial_lse + state, -infinity());
            added[i][n] =
                load_4_if(n < left, p_.workspace.partial_o + state * S::kHeadDimVo + dim, 0.0F);
          }
          from[i] += kStatesAtOnce * p_.schedule.tile_q;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
          for (int n = 0; n < kStatesAtOnce; ++n) {
            o[i] = merge_values(o[i], added[i][n], merged[i].add(lse[i][n]));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = first + i * kRowStep;
        if (r < end) {
          write_result<S>(p_, typename S::Variant(p_), merge.rows, merge.kv_head, r, dim, o[i],
                          merged[i].inverse(), merged[i].lse());
        }
      }
    }
  }

  const AttentionParams& p_;
  const uint32_t base_;
  const int warpgroup_;
  const int first_row_;
  const int thread_;
};

}  // namespace flashplan::device
