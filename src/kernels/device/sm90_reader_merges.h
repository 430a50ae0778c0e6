// SPDX-License-Identifier: Apache-2.0
// Merges of requests that read shared prefixes, in the sm90 family.
#pragma once

#include "kernels/device/attention_state.h"
#include "kernels/device/hopper.h"
#include "kernels/device/sm90_output.h"
#include "kernels/device/sm90_shape.h"

namespace flashplan::device {

FLASHPLAN_DEVICE int32_t* counter_of(const AttentionParams& p, int32_t merge) {
  return p.schedule.arrivals + kArrivalsPerMerge * merge;
}
/// Arrives at a merge, and returns whether nobody else will.
FLASHPLAN_DEVICE bool is_last_to_arrive(int32_t* counter, int32_t expected) {
  const bool is_last = arrive(counter) + 1 == expected;
  if (is_last) *counter = 0;  // for the next run
  return is_last;
}

/// All consumers of a CTA merge the requests of its tiles together, at the end of its queue. Until
/// then most prefixes are complete, so that nobody waits for them before the next tile; and each
/// CTA merges the requests that it has computed, where otherwise the CTA that completes a prefix
/// would merge all its readers, one after the other.
template <typename S>
class Sm90ReaderMerges {
 public:
  FLASHPLAN_DEVICE Sm90ReaderMerges(const AttentionParams& p, uint32_t base)
      : p_(p), output_(p), base_(base), thread_(opaque(static_cast<int>(threadIdx.x))) {}

  /// Prepares shared memory, before the warpgroups begin.
  FLASHPLAN_DEVICE void begin() const {
    for (int i = 0; i < kReader; ++i) store_word(i, 0);
  }

  /// Leaves a request's merge to merge_all(). Called by one thread.
  FLASHPLAN_DEVICE void defer(int32_t number) const {
    const uint32_t i = add_shared(word(kNumReaders), 1);
    if (i < S::kMostReaders) store_word(kReader + i, number);
  }

  /// Called by the threads of a warpgroup that has completed a prefix: arrives at the merges of its
  /// readers. If a reader has arrived before, because it did not wait any longer, its merge is
  /// marked for merge_all().
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

  /// Called by all consumers at the end of the queue.
  FLASHPLAN_DEVICE void merge_all() const {
    constexpr int kThreads = 128 * S::kWarpgroups;
    barrier_wait(S::kConsumerBarrier, kThreads);  // all partial results of this CTA are written
    const int32_t num_readers = load_word(kNumReaders);
    const bool has_complete = load_word(kHasComplete) != 0;
    if (num_readers == 0 && !has_complete) return;
    // If not all requests are in the list, they are searched for.
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

 private:
  static constexpr int32_t kNone = -1;
  static constexpr int32_t kComplete = -1;  // a counter: all have arrived, and nobody merges yet

  // Words of shared memory.
  static constexpr int kNumReaders = 0;   // requests of this CTA
  static constexpr int kHasComplete = 1;  // whether this CTA has marked merges as complete
  static constexpr int kNumListed = 2;    // merges to be merged now, in even and in odd rounds
  static constexpr int kReader = 4;       // the merges of the first kMostReaders requests

  FLASHPLAN_DEVICE uint32_t word(int i) const { return base_ + S::kReaders + i * 4; }
  FLASHPLAN_DEVICE int32_t load_word(int i) const {
    return static_cast<int32_t>(load_shared_4(word(i)));
  }
  FLASHPLAN_DEVICE void store_word(int i, int32_t value) const {
    store_shared_4(word(i), static_cast<uint32_t>(value));
  }
  /// Memory of keys and values, which nobody uses any more.
  FLASHPLAN_DEVICE uint32_t listed(uint32_t i) const { return base_ + S::kFirstSlot + i * 4; }

  /// A thread's search through the merges of the queue: warps share the work tiles, lanes the heads
  /// of a tile.
  struct Search {
    bool seeks_complete;  // readers of prefixes that may be marked, not requests of the tiles
    int32_t tile;
    int32_t end;
    int32_t head;
    int32_t reader;  // next one of a prefix

    FLASHPLAN_DEVICE bool has_ended() const { return tile >= end; }
    FLASHPLAN_DEVICE void next_head(int32_t num_heads) {
      reader = 0;
      head += 32;
      if (head < num_heads) return;
      head %= 32;
      tile += 4 * S::kWarpgroups;
    }
  };
  FLASHPLAN_DEVICE Search begin_search(bool seeks_complete) const {
    const QueueStart& queue = p_.schedule.starts[blockIdx.x];
    return {seeks_complete, queue.begin + thread_ / 32, queue.end, thread_ % 32, 0};
  }

  /// The next merge that the search finds; kNone: no more.
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

  /// Whether this CTA has to merge a request that has been found. Waits for its prefixes.
  FLASHPLAN_DEVICE bool has_to_merge(int32_t number, bool may_be_marked) const {
    if (may_be_marked) return compare_and_swap(counter_of(p_, number), kComplete, 0);
    const Merge& merge = p_.schedule.merges[number];
    wait_for_prefixes(p_, merge, counter_of(p_, number));
    return is_last_to_arrive(counter_of(p_, number), merge.num_pieces);
  }

  /// Merges `count` listed requests. A warp merges one row at a time.
  FLASHPLAN_DEVICE void merge_listed(int32_t count) const {
    constexpr int kWarps = 4 * S::kWarpgroups;
    int32_t first = thread_ / 32;  // row of the next request, for this warp
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const Merge& merge = p_.schedule.merges[load_shared_4(listed(i))];
#pragma unroll 1
      for (; first < merge.rows.num_rows; first += kWarps) merge_row(merge, first);
      first -= merge.rows.num_rows;
    }
  }

  /// The states of one merge, as far as they are not merged yet.
  struct States {
    int64_t row;  // the partial row of the next one
    int32_t count;
    int32_t parent;  // the merge of the next prefix; -1: none
  };

  /// Merges the states of a request's row in the order of their keys, then those of the prefixes
  /// that it reads, from the innermost outwards. Loads states of two merges at once, since many
  /// requests have one state of their own.
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
      output_.write_four(rows, merge.kv_head, row, dim, scaled(o, merged.inverse()), merged.lse());
    }
  }

  const AttentionParams& p_;
  const Sm90Output<S> output_;
  const uint32_t base_;
  const int thread_;  // of all consumers
};

}  // namespace flashplan::device
