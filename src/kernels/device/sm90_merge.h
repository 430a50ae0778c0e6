// SPDX-License-Identifier: Apache-2.0
// Merges of partial results by a consumer warpgroup of the sm90 family.
#pragma once

#include "kernels/device/attention_state.h"
#include "kernels/device/hopper.h"
#include "kernels/device/sm90_output.h"
#include "kernels/device/sm90_shape.h"

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
  /// warpgroup are merged apart, with an arrival counter of their own.
  FLASHPLAN_DEVICE void arrive_at(int32_t number) const {
    const Merge merge = p_.schedule.merges[number];  // loaded while the others arrive
    const bool shares = S::Variant::kIsBuiltIn && (merge.parent >= 0 || merge.num_readers > 0);
    const int id = S::kOwnBarrier + warpgroup_;
    barrier_wait(id, 128);
    if (thread_ == 0) {
      if (shares && merge.num_readers == 0) {
        wait_for_prefixes(p_, merge, p_.schedule.arrivals + kArrivalsPerMerge * number);
      }
      const int counter = shares ? 0 : first_row_ / 64;
      const int32_t expected = shares ? arrivals_of_sharer(merge) : merge.num_pieces;
      store_shared_4(flags(), is_last_to_arrive(number, counter, expected));
    }
    barrier_wait(id, 128);
    if (load_shared_4(flags()) == 0) return;
    if (shares) {
      finish_sharer(number);
    } else {
      merge_states(merge);
    }
  }

 private:
  FLASHPLAN_DEVICE bool is_last_to_arrive(int32_t number, int counter, int32_t expected) const {
    int32_t* arrivals = p_.schedule.arrivals + kArrivalsPerMerge * number + counter;
    const bool is_last = arrive(arrivals) + 1 == expected;
    if (is_last) *arrivals = 0;  // for the next run
    return is_last;
  }
  /// Four words of shared memory for this warpgroup.
  FLASHPLAN_DEVICE uint32_t flags() const { return base_ + S::kFlags + warpgroup_ * 16; }

  /// The rows of a request may be those of two warpgroups in the tile of its prefix. So the rows of
  /// a sharer are merged at once, after all warpgroups have arrived for each piece of its own, and
  /// its prefixes once each.
  FLASHPLAN_DEVICE int32_t arrivals_of_sharer(const Merge& merge) const {
    if (merge.rows.num_rows <= 64) return merge.num_pieces;
    const int32_t prefixes = merge.num_readers == 0 ? num_prefixes(p_, merge) : 0;
    return (merge.num_pieces - prefixes) * S::kWarpgroups + prefixes;
  }

  /// Merges the rows of a request that is complete. A prefix that is complete arrives at the merges
  /// of the requests that read it, and merges those that are complete by that.
  FLASHPLAN_DEVICE void finish_sharer(int32_t number) const {
    const Merge& merge = p_.schedule.merges[number];
    const bool is_prefix = merge.num_readers > 0;
    const int32_t first_request = is_prefix ? merge.first_reader : number;
    const int id = S::kOwnBarrier + warpgroup_;
#pragma unroll 1
    for (int32_t first = 0; first < max(merge.num_readers, 1); first += 128) {
      const int32_t own = first + thread_;
      bool is_last = !is_prefix && own == 0;
      if (own < merge.num_readers) {
        const int32_t request = first_request + own * merge.reader_step;
        is_last = is_last_to_arrive(request, 0, arrivals_of_sharer(p_.schedule.merges[request]));
      }
      const uint32_t of_warp = __ballot_sync(0xffffffffU, is_last);
      barrier_wait(id, 128);  // the flags before have been read
      if (thread_ % 32 == 0) store_shared_4(flags() + thread_ / 32 * 4, of_warp);
      barrier_wait(id, 128);
#pragma unroll 1
      for (int warp = 0; warp < 4; ++warp) {
        uint32_t left = load_shared_4(flags() + warp * 4);
#pragma unroll 1
        for (; left != 0; left &= left - 1) {
          const int32_t reader = first + warp * 32 + __ffs(static_cast<int>(left)) - 1;
          merge_with_prefixes(p_.schedule.merges[first_request + reader * merge.reader_step]);
        }
      }
    }
  }

  /// Merges the states of a request's rows in the order of their keys, then those of the prefixes
  /// that it reads, from the innermost outwards. A thread has 4 dims of a row.
  FLASHPLAN_DEVICE void merge_with_prefixes(const Merge& merge) const {
    constexpr int kQuads = S::kHeadDimVo / 4;
    constexpr int kStatesAtOnce = S::kWarpgroups > 2 ? 6 : 12;  // more are spilled
    const PackedRows& rows = merge.rows;
#pragma unroll 1
    for (int quad = thread_; quad < rows.num_rows * kQuads; quad += 128) {
      const int row = quad / kQuads;
      const int dim = quad % kQuads * 4;
      MergedRow merged;
      merged.reset();
      float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
      const Merge* from = &merge;
#pragma unroll 1
      for (;;) {
        const int32_t parent = from->parent;
        int64_t at = int64_t{from->first_partial_row} +
                     rows.row_in(from->rows, p_.schedule.group_size) + row;
#pragma unroll 1
        for (int32_t left = from->num_states; left > 0; left -= kStatesAtOnce) {
          float4 added[kStatesAtOnce];
          float lse[kStatesAtOnce];
#pragma unroll
          for (int i = 0; i < kStatesAtOnce; ++i) {
            const int64_t state = at + i * p_.schedule.tile_q;
            lse[i] = load_if(i < left, p_.workspace.partial_lse + state, -infinity());
            added[i] =
                load_4_if(i < left, p_.workspace.partial_o + state * S::kHeadDimVo + dim, 0.0F);
          }
          at += kStatesAtOnce * p_.schedule.tile_q;
#pragma unroll
          for (int i = 0; i < kStatesAtOnce; ++i) {
            o = merge_values(o, added[i], merged.add(lse[i]));
          }
        }
        if (parent < 0) break;
        from = p_.schedule.merges + parent;
      }
      output_.write_four(rows, merge.kv_head, row, dim, scaled(o, merged.inverse()), merged.lse());
    }
  }

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
