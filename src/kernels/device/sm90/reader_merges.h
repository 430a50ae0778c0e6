// SPDX-License-Identifier: Apache-2.0
// How the sm90 family merges the results of requests that read shared prefixes.
#pragma once

#include "kernels/device/attention_state.h"
#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/shared_memory.h"
#include "kernels/device/write_result.h"

namespace flashplan::device {

/// Merges the partial results of a CTA's requests with those of their prefixes, after the CTA has
/// computed all tiles of its queue. Prefixes come first in all queues, so by then they are usually
/// complete: the CTA waits for them once, instead of after each tile. The readers of a prefix are
/// the requests that begin with it.
///
///   1. For its work tiles of readers, a CTA arrives at the readers' merges in merge_all() alone,
///      because only then has it written all of its states. It first waits for the readers'
///      prefixes, but not for ever, since the CTAs of these may start only when this one has ended.
///   2. The last arrival at a reader's merge decides who merges it. If it is that of a work tile,
///      its CTA merges the reader and sets the counter to 0. If it is that of a prefix, the counter
///      becomes kComplete: the reader is marked.
///   3. A marked reader is merged by whoever sets its counter from kComplete to 0, by a
///      compare-and-swap. The CTA that has marked readers searches for marked ones among the
///      readers of all prefixes in its queue, so none is left over.
///   4. From the first barrier of merge_all() on, only this class uses Sm90Readers and the slots.
///      Before it, consumer threads only write to Sm90Readers: they add readers to the list, and
///      set has_complete.
template <typename S>
class Sm90ReaderMerges {
 public:
  FLASHPLAN_DEVICE Sm90ReaderMerges(const AttentionParams& p, const Sm90Smem<S>& smem)
      : p_(p), smem_(smem), thread_(opaque(static_cast<int>(threadIdx.x))) {}

  /// Clears this class's words of shared memory. One thread calls it, before the first barrier of
  /// the CTA.
  FLASHPLAN_DEVICE void begin() const {
    for (int i = 0; i < kReader; ++i) store_word(i, 0);
  }

  /// Puts the merge of a request into the list for merge_all(). One thread of a warpgroup calls it,
  /// after a tile of the request.
  FLASHPLAN_DEVICE void defer(int32_t number) const {
    const uint32_t i = add_shared(word(kNumReaders), 1);
    if (i < Sm90Readers::kMost) store_word(kReader + i, number);
  }

  /// Arrives at the merges of all readers of a complete prefix. All threads of the warpgroup that
  /// completed the prefix call it. The CTAs of a reader may have arrived at its merge already,
  /// because they waited too long for the prefix. If this is then the last arrival there, the
  /// reader's counter is set to kComplete, and a merge_all() that finds this merges the reader (3).
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

  /// Merges the `num_readers` requests in the list, if they fit in it; otherwise searches the tiles
  /// of the queue for them. If `has_complete`, also searches for the requests marked kComplete.
  FLASHPLAN_DEVICE void merge_readers(int32_t num_readers, bool has_complete) const {
    const bool has_all = num_readers <= Sm90Readers::kMost;
    Search search = {};
    if (!has_all) search = begin_search(false);
#pragma unroll 1
    for (int round = 0;; ++round) {
      const int32_t number = round == 0 && has_all && thread_ < num_readers
                                 ? load_word(kReader + thread_)
                                 : find_next(search);
      if (thread_ == 0) store_word(kNumListed + (round + 1) % 2, 0);
      if (number != kNone) {
        const Merge merge = p_.schedule.merges[number];
        const Listed request = listed_of(merge);  // loaded while this thread waits
        if (has_to_merge(merge, number, search.seeks_complete)) {
          request.store(listed(add_shared(word(kNumListed + round % 2), 1)));
        }
      }
      __syncwarp();
      barrier_wait(S::kConsumerBarrier, kThreads);
      merge_listed(load_word(kNumListed + round % 2));
      if (barrier_any(S::kConsumerBarrier, kThreads, !search.has_ended())) continue;
      if (search.seeks_complete || !has_complete) return;
      search = begin_search(true);
    }
  }

  // Offsets of the members of Sm90Readers, in words.
  static constexpr int kNumReaders = FLASHPLAN_OFFSET_OF(Sm90Readers, count) / 4;
  static constexpr int kHasComplete = FLASHPLAN_OFFSET_OF(Sm90Readers, has_complete) / 4;
  static constexpr int kNumListed = FLASHPLAN_OFFSET_OF(Sm90Readers, num_listed) / 4;
  static constexpr int kReader = FLASHPLAN_OFFSET_OF(Sm90Readers, merges) / 4;

  FLASHPLAN_DEVICE uint32_t word(int i) const { return smem_.readers() + i * 4; }
  FLASHPLAN_DEVICE int32_t load_word(int i) const {
    return static_cast<int32_t>(load_shared_4(word(i)));
  }
  FLASHPLAN_DEVICE void store_word(int i, int32_t value) const {
    store_shared_4(word(i), static_cast<uint32_t>(value));
  }

  /// Partial states of one row that one Merge names and that are still to be merged.
  struct States {
    int32_t row;  // partial row of the first state
    int32_t count;
    int32_t parent;  // number of the Merge of the next outer prefix; -1: none
  };
  /// The states that `from`, the merge of a request or of a prefix around it, has for the first of
  /// the request's rows.
  FLASHPLAN_DEVICE States states_of(const Merge& from, const PackedRows& rows) const {
    return {from.first_partial_row + rows.row_in(from.rows, p_.schedule.group_size),
            from.num_states, from.parent};
  }
  FLASHPLAN_DEVICE States states_of_parent(const States& child, const PackedRows& rows) const {
    return child.parent < 0 ? States{0, 0, -1} : states_of(p_.schedule.merges[child.parent], rows);
  }

  /// A request to merge in this round, with the states of its first row. Those of row r lie r
  /// partial rows behind them.
  struct Listed {
    PackedRows rows;
    int32_t kv_head;
    States own;
    States around;  // the states of its innermost prefix

    static constexpr int kBytes = 48;
    FLASHPLAN_DEVICE void store(uint32_t to) const {
      const auto word = [](int32_t x) { return static_cast<uint32_t>(x); };
      store_shared_16(to, __builtin_bit_cast(uint4, rows));
      store_shared_16(to + 16, {word(kv_head), word(own.row), word(own.count), 0});
      store_shared_16(to + 32, {word(around.row), word(around.count), word(around.parent), 0});
    }
    static FLASHPLAN_DEVICE Listed load(uint32_t from) {
      const int4 head = __builtin_bit_cast(int4, load_shared_16(from + 16));
      const int4 prefix = __builtin_bit_cast(int4, load_shared_16(from + 32));
      return {__builtin_bit_cast(PackedRows, load_shared_16(from)),
              head.x,
              {head.y, head.z, -1},
              {prefix.x, prefix.y, prefix.z}};
    }
  };
  FLASHPLAN_DEVICE Listed listed_of(const Merge& merge) const {
    const States own = states_of(merge, merge.rows);
    return {merge.rows, merge.kv_head, own, states_of_parent(own, merge.rows)};
  }
  /// Address of entry i of the requests to merge in this round. Each thread adds one at most. The
  /// list lies where keys and values were, which all warps have used by now.
  static_assert(kThreads * Listed::kBytes <= S::kMergeBytes);
  FLASHPLAN_DEVICE uint32_t listed(uint32_t i) const { return smem_.slot(0) + i * Listed::kBytes; }

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
  /// reader of a prefix. Then this neither waits nor arrives: if the counter is kComplete, it sets
  /// the counter to 0 and returns true, otherwise it returns false.
  FLASHPLAN_DEVICE bool has_to_merge(const Merge& merge, int32_t number, bool may_be_marked) const {
    int32_t* const counter = counter_of(p_, number);
    if (may_be_marked) return compare_and_swap(counter, kComplete, 0);
    // If all others have arrived, this CTA is the last one and need not arrive: an atomic operation
    // would take as long as loading the states does.
    if (wait_for_prefixes(merge, counter) + 1 < merge.num_pieces) {
      return is_last_to_arrive(counter, merge.num_pieces);
    }
    *counter = 0;  // for the next run
    return true;
  }

  /// Merges the `count` requests of this round. Warps take their rows in turn, one row at a time.
  FLASHPLAN_DEVICE void merge_listed(int32_t count) const {
    int32_t row = thread_ / 32;  // this warp's next row of request i
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const Listed request = Listed::load(listed(i));
#pragma unroll 1
      for (; row < request.rows.num_rows; row += kWarps) merge_row(request, row);
      row -= request.rows.num_rows;
    }
  }

  /// Merges the states of one row of a request: first its own in the order of their keys, then
  /// those of its prefixes, from the innermost to the outermost. A warp calls it: each lane
  /// computes the weight of one state, and adds 4 dims of all states. Many requests have only one
  /// state of their own; it is loaded together with those of the prefix, so that the warp waits
  /// once for both.
  FLASHPLAN_DEVICE void merge_row(const Listed& request, int row) const {
    constexpr int kQuads = S::kHeadDimVo / 4;
    constexpr int kStatesAtOnce = S::kWarpgroups > 2 ? 6 : 12;  // more are spilled
    const int lane = thread_ % 32;
    const int32_t state_rows = p_.schedule.tile_q;
#pragma unroll 1
    for (int first_quad = 0; first_quad < kQuads; first_quad += 32) {
      const int dim = (first_quad + lane % kQuads) * 4;
      MergedRow merged;
      merged.reset();
      float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
      States now = request.own;
      States next = request.around;
#pragma unroll 1
      while (now.count + next.count > 0) {
        const int32_t count = now.count + next.count;
        const auto state = [&](int i) {
          const int32_t first = i < now.count ? now.row : next.row - now.count * state_rows;
          return int64_t{first + row + i * state_rows};
        };
        const float lse = load_if(lane < min(count, kStatesAtOnce),
                                  p_.workspace.partial_lse + state(lane), -infinity());
        float4 added[kStatesAtOnce];
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
          added[i] =
              load_4_if(i < count, p_.workspace.partial_o + state(i) * S::kHeadDimVo + dim, 0.0F);
        }
        float weight;  // weight of state `lane`
        o = scaled(o, merged.add_of_lanes(lse, &weight));
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
          o = merge_values(o, added[i], {1.0F, __shfl_sync(0xffffffffU, weight, i)});
        }
        if (now.count >= kStatesAtOnce) {
          now.row += kStatesAtOnce * state_rows;
          now.count -= kStatesAtOnce;
        } else {
          const int32_t of_next = min(kStatesAtOnce - now.count, next.count);
          next.row += of_next * state_rows;
          next.count -= of_next;
          now = next;
          next = states_of_parent(now, request.rows);
        }
      }
      if (lane < kQuads) {
        write_result<S>(p_, typename S::Variant(p_), request.rows, request.kv_head, row, dim, o,
                        merged.inverse(), merged.lse());
      }
    }
  }

  const AttentionParams& p_;
  const Sm90Smem<S> smem_;
  const int thread_;  // number among the threads of all consumers
};

}  // namespace flashplan::device
