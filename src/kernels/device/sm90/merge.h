// SPDX-License-Identifier: Apache-2.0
// Merges of partial results by a consumer warpgroup of the sm90 family.
#pragma once

#include "kernels/device/attention_state.h"
#include "kernels/device/merge_part.h"
#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/reader_merges.h"
#include "kernels/device/write_result.h"

namespace flashplan::device {

/// Merges partial results after the queue has ended. arrive_at() is inlined, because before a call
/// the compiler would wait for the products in flight.
template <typename S>
class Sm90Merge {
 public:
  /// The warpgroup's partial results are those of the 64 rows of its tile from `first_row` on.
  FLASHPLAN_DEVICE Sm90Merge(const AttentionParams& p, const Sm90Smem<S>& smem, int warpgroup,
                             int first_row, int thread)
      : p_(p), smem_(smem), warpgroup_(warpgroup), first_row_(first_row), thread_(thread) {}

  /// Empties the lists of waiting merges, and initialises the mbarrier on which merge_many_rows()
  /// waits for its bulk copies. One thread calls it before the first barrier of the CTA.
  static FLASHPLAN_DEVICE void begin(const Sm90Smem<S>& smem) {
    for (int i = 0; i < S::kWarpgroups; ++i) store_shared_4(smem.waiting(i), 0);
    mbarrier_init(smem.states_full(), 1);
  }

  /// Arrives at a merge. If this warpgroup then has rows to merge, puts them into this warpgroup's
  /// list for merge_waiting(). Each warpgroup of a tile has an arrival counter for its own rows;
  /// only the merge of a shared prefix has one counter for all rows. If the merge is that of a
  /// request that reads prefixes, this call does not arrive. It puts the merge into the list of
  /// Sm90ReaderMerges, which arrives at the merge when the queue has ended. `is_final`: no tiles
  /// are left to compute.
  FLASHPLAN_DEVICE void arrive_at(int32_t number, bool is_final) const {
    // The record is loaded while other threads come to the barrier.
    const Merge merge = p_.schedule.merges[number];
    const bool is_prefix = S::Variant::kIsBuiltIn && merge.num_readers > 0;
    if (S::Variant::kIsBuiltIn && !is_prefix && merge.parent >= 0) {
      // Only the warpgroup that has the first rows of a tile does this, so that it is done once.
      if (thread_ == 0 && first_row_ == 0) Sm90ReaderMerges<S>(p_, smem_).defer(number);
      return;
    }
    const int id = S::kOwnBarrier + warpgroup_;
    barrier_wait(id, 128);
    if (is_prefix) {
      if (thread_ == 0) {
        // All warpgroups that share the tile of a prefix arrive at one counter.
        const int32_t of_piece = merge.rows.num_rows > 64 ? S::kWarpgroups : 1;
        const bool is_last = is_last_to_arrive(counter_of(p_, number), merge.num_pieces * of_piece);
        store_shared_4(list() + kIsLast, is_last ? 1 : 0);
      }
      barrier_wait(id, 128);
      if (load_shared_4(list() + kIsLast) == 0) return;
      Sm90ReaderMerges<S>(p_, smem_).arrive_at_readers(merge, thread_);
    } else if (thread_ == 0) {
      const uint32_t count = load_shared_4(list() + kCount);
      const bool has_time = is_final && count == 0;
      const MergePart part =
          arrive_at_merge(counter_of(p_, number) + first_row_ / 64, merge, has_time);
      if (part.count == 0) return;
      store_shared_4(list() + kCount, count + 1);
      store_shared_16(list() + kEntries + count * sizeof(Sm90WaitingMerge),
                      {static_cast<uint32_t>(part.index), static_cast<uint32_t>(part.count),
                       static_cast<uint32_t>(number),
                       static_cast<uint32_t>(first_row_) | (has_many_rows(merge) ? kManyRows : 0)});
    }
  }

  /// Merges the rows in all lists of arrive_at(). All consumers call it after their last tile. If
  /// they merged right after a tile, this code would lie among that of tiles, which would then not
  /// fit into the first 64 KB (sm90_attention_kernel), and the compiler would spill the products'
  /// registers. Few rows are merged by the warpgroup that has arrived, many rows by all warpgroups
  /// together.
  static FLASHPLAN_DEVICE void merge_waiting(const AttentionParams& p, const Sm90Smem<S>& smem,
                                             int warpgroup, int thread) {
    barrier_wait(S::kConsumerBarrier, kThreads);
    uint32_t phase = 0;
#pragma unroll 1
    for (int i = 0; i < S::kWarpgroups; ++i) {
      const uint32_t list = smem.waiting(i);
      const uint32_t count = load_shared_4(list + kCount);
#pragma unroll 1
      for (uint32_t n = 0; n < count; ++n) {
        const uint4 entry = load_shared_16(list + kEntries + n * sizeof(Sm90WaitingMerge));
        if (S::Variant::kIsBuiltIn && (entry.w & kManyRows) != 0) {
          merge_many_rows(p, smem, waiting_merge(p, entry), warpgroup * 128 + thread, phase);
        } else if (i == warpgroup) {
          merge_few_rows(p, waiting_merge(p, entry), thread);
        }
      }
    }
  }

 private:
  /// A merge whose rows [begin, end) wait for merge_waiting().
  struct Waiting {
    Merge merge;
    int32_t begin;
    int32_t end;
  };
  static FLASHPLAN_DEVICE Waiting waiting_merge(const AttentionParams& p, uint4 entry) {
    const MergePart part = {static_cast<int32_t>(entry.x), static_cast<int32_t>(entry.y)};
    const auto first_row = static_cast<int32_t>(entry.w & ~kManyRows);
    const Merge merge = p.schedule.merges[entry.z];
    const int32_t num_rows = min(merge.rows.num_rows - first_row, 64);
    return {merge, first_row + part.begin(num_rows), first_row + part.end(num_rows)};
  }

  static constexpr uint32_t kManyRows = 1U << 31;  // set in an entry's word w if has_many_rows()
  // The warpgroup's list of merges, and offsets in it.
  FLASHPLAN_DEVICE uint32_t list() const { return smem_.waiting(warpgroup_); }
  static constexpr int kCount = FLASHPLAN_OFFSET_OF(Sm90WaitingMerges, count);
  static constexpr int kIsLast = FLASHPLAN_OFFSET_OF(Sm90WaitingMerges, is_last);
  static constexpr int kEntries = FLASHPLAN_OFFSET_OF(Sm90WaitingMerges, merges);
  static_assert(sizeof(Sm90WaitingMerge) == sizeof(uint4));  // one load or store moves an entry

  static constexpr int kThreads = 128 * S::kWarpgroups;
  static constexpr int kRowBytes = S::kHeadDimVo * 4;  // bytes of a row of partial results
  // How many rows of partial results, with their lse, the slots hold.
  static constexpr int kMostStates = S::kMergeBytes / (kRowBytes + 4);
  static FLASHPLAN_DEVICE bool has_many_rows(const Merge& merge) {
    return S::Variant::kIsBuiltIn && may_divide(merge) && merge.num_states <= kMostStates;
  }

  /// Merges rows [begin, end). A warp merges a row: each lane computes the weight of one state,
  /// then adds 4 dims of all states.
  static FLASHPLAN_DEVICE void merge_few_rows(const AttentionParams& p, const Waiting& waiting,
                                              int thread) {
    constexpr int kQuads = S::kHeadDimVo / 4;
    constexpr int kQuadsOfLane = kQuads > 32 ? kQuads / 32 : 1;
    // Loading several states before they are used hides the latency of memory.
    constexpr int kStatesAtOnce = !S::Variant::kIsBuiltIn ? 4
                                  : S::kWarpgroups > 2    ? 6
                                                          : 16 / kQuadsOfLane;
    constexpr int64_t kStateRows = S::kTileQ;
    const Merge& merge = waiting.merge;
    const int lane = thread % 32;
#pragma unroll 1
    for (int row = waiting.begin + thread / 32; row < waiting.end; row += 4) {
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
            load_if(lane < count, p.workspace.partial_lse + from + lane * kStateRows, -infinity());
        float weight = 1.0F;
#pragma unroll 1
        for (int n = 0; n < count; n += kStatesAtOnce) {
          const float* states = p.workspace.partial_o + (from + n * kStateRows) * S::kHeadDimVo;
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
          // lse is first used here, not before the loop, so that it arrives together with o.
          if (S::Variant::kUseSoftmax && n == 0) {
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
          write_result<S>(p, typename S::Variant(p), merge.rows, merge.kv_head, row,
                          (q * 32 + lane) * 4, o[q],
                          S::Variant::kUseSoftmax ? merged.inverse() : 1.0F, merged.lse());
        }
      }
    }
  }

  /// Merges rows [begin, end); the threads of all consumer warpgroups call it. Bulk copies bring
  /// the states of as many rows as fit into the slots, whose keys and values have all been used.
  /// Then a thread merges 4 dims of a row at a time. `phase`: the parity of the mbarrier's next
  /// phase. The code is short, because at the end of a launch its instructions come from memory.
  static FLASHPLAN_DEVICE void merge_many_rows(const AttentionParams& p, const Sm90Smem<S>& smem,
                                               const Waiting& waiting, int thread,
                                               uint32_t& phase) {
    constexpr int kQuads = S::kHeadDimVo / 4;
    const Merge& merge = waiting.merge;
    const int dim = thread % kQuads * 4;
    const uint32_t values = smem.slot(0);
    const uint32_t full = smem.states_full();
    const int most_rows = kMostStates / merge.num_states;
#pragma unroll 1
    for (int first = waiting.begin; first < waiting.end; first += most_rows) {
      const int num_rows = min(most_rows, waiting.end - first);
      const int64_t from = int64_t{merge.first_partial_row} + first;
      const uint32_t lse = values + merge.num_states * num_rows * kRowBytes;
      barrier_wait(S::kConsumerBarrier, kThreads);  // nobody reads this memory any more
      if (thread == 0) {
        fence_async_proxy_of_all_memory();
        mbarrier_arrive_expect(full, merge.num_states * num_rows * kRowBytes);
      }
#pragma unroll 1
      for (int n = 0; n < merge.num_states; ++n) {
        const int64_t state = from + n * int64_t{S::kTileQ};
        if (thread == 0) {
          bulk_load(values + n * num_rows * kRowBytes,
                    p.workspace.partial_o + state * S::kHeadDimVo, num_rows * kRowBytes, full);
        }
        if (thread < num_rows) {
          cp_async_4(lse + (n * num_rows + thread) * 4, p.workspace.partial_lse + state + thread);
        }
      }
      cp_async_wait_all();
      barrier_wait(S::kConsumerBarrier, kThreads);
      mbarrier_wait(full, phase);
      phase ^= 1;
#pragma unroll 1
      for (int row = thread / kQuads; row < num_rows; row += kThreads / kQuads) {
        MergedRow merged;
        merged.reset();
        float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 1
        for (int i = row; i < merge.num_states * num_rows; i += num_rows) {
          const uint4 words = load_shared_16(values + i * kRowBytes + dim * 4);
          const float4 added = {__uint_as_float(words.x), __uint_as_float(words.y),
                                __uint_as_float(words.z), __uint_as_float(words.w)};
          o = merge_values(o, added, merged.add(__uint_as_float(load_shared_4(lse + i * 4))));
        }
        write_result<S>(p, typename S::Variant(p), merge.rows, merge.kv_head, first + row, dim, o,
                        merged.inverse(), merged.lse());
      }
      __syncwarp();  // lanes of a warp may leave the loop over rows in different rounds
    }
  }

  const AttentionParams& p_;
  const Sm90Smem<S> smem_;
  const int warpgroup_;
  const int first_row_;
  const int thread_;
};

}  // namespace flashplan::device
