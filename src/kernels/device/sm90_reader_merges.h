// SPDX-License-Identifier: Apache-2.0
// How the sm90 family merges the results of requests that read shared prefixes.
#pragma once

#include "kernels/device/attention_state.h"
#include "kernels/device/hopper.h"
#include "kernels/device/sm90_shape.h"
#include "kernels/device/write_result.h"

namespace flashplan::device {

FLASHPLAN_DEVICE int32_t* counter_of(const AttentionParams& p, int32_t merge) {
  return p.schedule.arrivals + kArrivalsPerMerge * merge;
}

/// Merges the partial results of a CTA's requests with those of their prefixes, after the CTA has
/// computed all tiles of its queue. Prefixes come first in all queues, so by then they are usually
/// complete: the CTA waits for them once, instead of after each tile. The readers of a prefix are
/// the requests that begin with it.
template <typename S>
class Sm90ReaderMerges {
 public:
  FLASHPLAN_DEVICE Sm90ReaderMerges(const AttentionParams& p, uint32_t base)
      : p_(p), base_(base), thread_(opaque(static_cast<int>(threadIdx.x))) {}

  /// Clears this class's words of shared memory. One thread calls it, before the first barrier of
  /// the CTA.
  FLASHPLAN_DEVICE void begin() const {
    for (int i = 0; i < kReader; ++i) store_word(i, 0);
  }

  /// Puts the merge of a request into the list for merge_all(). One thread of a warpgroup calls it,
  /// after a tile of the request.
  FLASHPLAN_DEVICE void defer(int32_t number) const {
    const uint32_t i = add_shared(word(kNumReaders), 1);
    if (i < S::kMostReaders) store_word(kReader + i, number);
  }

  /// Arrives at the merges of all readers of a complete prefix. All threads of the warpgroup that
  /// completed the prefix call it. A request that waited too long for the prefix has arrived at its
  /// merge already, and this is then the last arrival there: the counter is set to kComplete, and
  /// merge_all() of this CTA merges that request.
  FLASHPLAN_DEVICE void arrive_at_readers(const Merge& prefix, int thread) const {
#pragma unroll 1
    for (int32_t i = thread; i < prefix.num_readers; i += 128) {
      const int32_t reader = prefix.first_reader + i * prefix.reader_step;
      if (arrive(counter_of(p_, reader)) + 1 == p_.schedule.merges[reader].num_pieces) {
        *counter_of(p_, reader) = kComplete;
        store_word(kHasComplete, 1);
      }
    }
  }

  /// Merges the requests in the list, and those whose counter arrive_at_readers() has set to
  /// kComplete. All consumer threads call it, after the last tile of the queue.
  FLASHPLAN_DEVICE void merge_all() const {
    barrier_wait(S::kConsumerBarrier, kThreads);  // all partial results of this CTA are written
    const int32_t num_readers = load_word(kNumReaders);
    const bool has_complete = load_word(kHasComplete) != 0;
    if (num_readers > 0 || has_complete) merge_readers(num_readers, has_complete);
  }

 private:
  static constexpr int kWarps = S::kConsumerWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int32_t kNone = -1;
  static constexpr int32_t kComplete = -1;  // arrival counter of a marked request

  /// The rest of merge_all(). It is not inlined, since most launches do not need it.
  __device__ __noinline__ void merge_readers(int32_t num_readers, bool has_complete) const {
    // The list has room for kMostReaders requests. If there are more, the tiles of the queue are
    // searched for them instead.
    const bool has_all = num_readers <= S::kMostReaders;
    Search search = {};
    if (!has_all) search = begin_search(false);
#pragma unroll 1
    for (int round = 0;; ++round) {
      const int32_t number = round == 0 && has_all && thread_ < num_readers
                                 ? load_word(kReader + thread_)
                                 : find_next(search);
      if (thread_ == 0) store_word(kNumListed + (round + 1) % 2, 0);
      if (number != kNone && has_to_merge(number, search.seeks_complete)) {
        store_shared_4(listed(add_shared(word(kNumListed + round % 2), 1)),
                       static_cast<uint32_t>(number));
      }
      __syncwarp();
      barrier_wait(S::kConsumerBarrier, kThreads);
      merge_listed(load_word(kNumListed + round % 2));
      if (barrier_any(S::kConsumerBarrier, kThreads, !search.has_ended())) continue;
      if (search.seeks_complete || !has_complete) return;
      search = begin_search(true);
    }
  }

  // Words of shared memory.
  static constexpr int kNumReaders = 0;   // number of requests, also if not all are in the list
  static constexpr int kHasComplete = 1;  // 1: this CTA has marked requests
  static constexpr int kNumListed = 2;    // requests to merge in this round: of even, of odd rounds
  static constexpr int kReader = 4;       // the list: merge numbers of up to kMostReaders requests

  FLASHPLAN_DEVICE uint32_t word(int i) const { return base_ + S::kReaders + i * 4; }
  FLASHPLAN_DEVICE int32_t load_word(int i) const {
    return static_cast<int32_t>(load_shared_4(word(i)));
  }
  FLASHPLAN_DEVICE void store_word(int i, int32_t value) const {
    store_shared_4(word(i), static_cast<uint32_t>(value));
  }
  /// Address of entry i of the requests to merge in this round. They take the memory of keys and
  /// values, which are not needed any more.
  FLASHPLAN_DEVICE uint32_t listed(uint32_t i) const { return base_ + S::kFirstSlot + i * 4; }

  /// The position of a thread in its search through the tiles of the queue. A warp looks at every
  /// kWarps-th tile, and a lane at every 32nd kv head of that tile.
  struct Search {
    bool seeks_complete;  // false: finds the requests of tiles; true: readers of tiles' prefixes
    int32_t tile;
    int32_t end;
    int32_t head;
    int32_t reader;  // the next reader of the prefix of this tile and head

    FLASHPLAN_DEVICE bool has_ended() const { return tile >= end; }
    FLASHPLAN_DEVICE void next_head(int32_t num_heads) {
      reader = 0;
      head += 32;
      if (head < num_heads) return;
      head %= 32;
      tile += kWarps;
    }
  };
  FLASHPLAN_DEVICE Search begin_search(bool seeks_complete) const {
    const QueueStart& queue = p_.schedule.starts[blockIdx.x];
    return {seeks_complete, queue.begin + thread_ / 32, queue.end, thread_ % 32, 0};
  }

  /// Goes on with the search. Returns the number of the next merge, or kNone if there is none.
  FLASHPLAN_DEVICE int32_t find_next(Search& search) const {
#pragma unroll 1
    while (!search.has_ended()) {
      const WorkTile& tile = p_.schedule.tiles[search.tile];
      const int32_t number = tile.merge + search.head;
      int32_t found = kNone;
      bool has_more = false;
      if (tile.merge >= 0 && search.head < tile.num_kv_heads) {
        const Merge& merge = p_.schedule.merges[number];
        if (!search.seeks_complete) {
          if (merge.num_readers == 0 && merge.parent >= 0) found = number;
        } else if (search.reader < merge.num_readers) {
          found = merge.first_reader + search.reader++ * merge.reader_step;
          has_more = search.reader < merge.num_readers;
        }
      }
      if (!has_more) search.next_head(tile.num_kv_heads);
      if (found != kNone) return found;
    }
    return kNone;
  }

  /// Waits for the prefixes of a request, and arrives at its merge. Returns whether it was the last
  /// to arrive, so that this CTA merges the request. `may_be_marked`: the request was found as the
  /// reader of a prefix. Then it returns whether the counter is kComplete, without waiting.
  FLASHPLAN_DEVICE bool has_to_merge(int32_t number, bool may_be_marked) const {
    if (may_be_marked) return compare_and_swap(counter_of(p_, number), kComplete, 0);
    const Merge& merge = p_.schedule.merges[number];
    wait_for_prefixes(p_, merge, counter_of(p_, number));
    return is_last_to_arrive(counter_of(p_, number), merge.num_pieces);
  }

  /// Merges the `count` requests of this round. Warps take their rows in turn, one row at a time.
  FLASHPLAN_DEVICE void merge_listed(int32_t count) const {
    int32_t first = thread_ / 32;  // this warp's first row of request i
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const Merge& merge = p_.schedule.merges[load_shared_4(listed(i))];
#pragma unroll 1
      for (; first < merge.rows.num_rows; first += kWarps) merge_row(merge, first);
      first -= merge.rows.num_rows;
    }
  }

  /// The states of a row that one Merge lists and that are still to be merged.
  struct States {
    int64_t row;  // partial row of the first of them
    int32_t count;
    int32_t parent;  // number of the Merge of the prefix around them; -1: none
  };

  /// Merges the states of one row of a request: first its own in the order of their keys, then
  /// those of its prefixes, from the innermost to the outermost. A warp calls it; each lane has 4
  /// dims at a time. Many requests have only one state of their own. It is loaded together with the
  /// states of the prefix, so that a row waits for memory once.
  FLASHPLAN_DEVICE void merge_row(const Merge& merge, int row) const {
    constexpr int kQuads = S::kHeadDimVo / 4;
    constexpr int kStatesAtOnce = S::kWarpgroups > 2 ? 6 : 12;  // more are spilled
    const PackedRows& rows = merge.rows;
    const int32_t state_rows = p_.schedule.tile_q;
    const auto states_of = [&](const Merge& from) {
      return States{
          int64_t{from.first_partial_row} + rows.row_in(from.rows, p_.schedule.group_size) + row,
          from.num_states, from.parent};
    };
    const auto states_of_parent = [&](const States& child) {
      return child.parent < 0 ? States{0, 0, -1} : states_of(p_.schedule.merges[child.parent]);
    };
#pragma unroll 1
    for (int quad = thread_ % 32; quad < kQuads; quad += 32) {
      const int dim = quad * 4;
      MergedRow merged;
      merged.reset();
      float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
      States now = states_of(merge);
      States next = states_of_parent(now);
#pragma unroll 1
      while (now.count + next.count > 0) {
        float4 added[kStatesAtOnce];
        float lse[kStatesAtOnce];
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
          const int64_t first = i < now.count ? now.row : next.row - now.count * state_rows;
          const int64_t state = first + i * state_rows;
          const bool is_there = i < now.count + next.count;
          lse[i] = load_if(is_there, p_.workspace.partial_lse + state, -infinity());
          added[i] =
              load_4_if(is_there, p_.workspace.partial_o + state * S::kHeadDimVo + dim, 0.0F);
        }
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
          o = merge_values(o, added[i], merged.add(lse[i]));
        }
        if (now.count >= kStatesAtOnce) {
          now.row += kStatesAtOnce * state_rows;
          now.count -= kStatesAtOnce;
        } else {
          const int32_t of_next = min(kStatesAtOnce - now.count, next.count);
          next.row += of_next * state_rows;
          next.count -= of_next;
          now = next;
          next = states_of_parent(now);
        }
      }
      write_result<S>(p_, typename S::Variant(p_), rows, merge.kv_head, row, dim, o,
                      merged.inverse(), merged.lse());
    }
  }

  const AttentionParams& p_;
  const uint32_t base_;
  const int thread_;  // of all consumers
};

}  // namespace flashplan::device
