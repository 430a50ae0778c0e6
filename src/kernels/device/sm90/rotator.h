// SPDX-License-Identifier: Apache-2.0
// The warpgroup of the sm90 family that rotates queries and keys in shared memory, in place, after
// they have arrived and before the consumers multiply them.
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/preparer.h"
#include "kernels/device/sm90/rotation_series.h"
#include "kernels/device/sm90/shape.h"

namespace flashplan::device {

/// Stands between producer and consumers: it waits for queries and keys at the barriers `q_loaded`
/// and `key_loaded`, rotates them, and announces them at `q_full` and `slot_full`. Values go from
/// the producer to the consumers directly.
template <typename S>
class Sm90Rotator {
 public:
  FLASHPLAN_DEVICE Sm90Rotator(const AttentionParams& p, const Sm90Smem<S>& smem)
      : p_(p), smem_(smem), thread_(static_cast<int>(threadIdx.x) % 128) {}

  FLASHPLAN_DEVICE void run() {
    for (int32_t i = 0;; ++i) {
      const int slot = i % S::kContexts;
      mbarrier_wait(smem_.context_full(slot), i / S::kContexts & 1);
      const Sm90Context& context = smem_.memory.contexts[slot];
      if (context.is_end) return;
      if (context.has_steps()) {
        const int32_t heads_end = context.tile.kv_head + context.tile.num_kv_heads;
        for (int32_t head = context.tile.kv_head; head < heads_end; ++head) {
          rotate_queries(context, head);
          int32_t key = context.tile.kv_begin;
          KeySeries series;
          bool begins = true;
          do {
            rotate_keys(key, begins, series);
            begins = !KeySeries::kGoesOn || !begins;  // anew every other step, as errors grow
            key += S::kTileKv;
          } while (key < context.tile.kv_end);
        }
      } else {
        follows_ = 0;
      }
      __syncwarp();
      if (thread_ % 32 == 0) mbarrier_arrive(smem_.context_empty(slot));
    }
  }

  /// Replaces run() where keys are prepared: it prepares keys, instead of rotating them in slots.
  /// The keys of a work tile are prepared or claimed before this waits for the tile's queries. The
  /// queries are loaded only when the consumers have freed memory for them, and before that the
  /// consumers may need these keys.
  FLASHPLAN_DEVICE void run_prepared() {
    Sm90Preparer<S> preparer(p_, smem_, thread_ / 32);
    for (int32_t i = 0;; ++i) {
      preparer.prepare_before(i + 1);
      const Sm90Context& context = preparer.wait_context(i);
      if (context.is_end) break;
      if (context.has_steps()) {
        const int32_t heads_end = context.tile.kv_head + context.tile.num_kv_heads;
#pragma unroll 1
        for (int32_t head = context.tile.kv_head; head < heads_end; ++head) {
          rotate_queries(context, head);
        }
      }
      preparer.release_context(i);
    }
    Sm90Prepared<S>::leave(p_);
  }

 private:
  using Variant = typename S::Variant;
  static constexpr int kThreads = 128;
  /// Whether the rotated dims are whole groups of four pairs.
  static constexpr bool kByFours = Variant::kRotaryDim % 8 == 0;

  /// Four pairs of every eighth key of a step, which one thread rotates. These keys are at the same
  /// place of their blocks of 8 rows, so one offset serves all of them.
  class KeySeries {
   private:
    using Pairs = FourPairs<Variant, S::kKv, typename S::Key>;
    static constexpr int kGroups = S::kTileKv / 8;
    static constexpr int kOfAllGroups = 8 * Pairs::kPerRow;
    // Where few dims are rotated, the blocks of 8 rows are divided among several series, so that
    // more threads have work.
    static constexpr int num_shares() {
      int shares = 1;
      while (2 * shares * kOfAllGroups <= kThreads && kGroups % (2 * shares) == 0) shares *= 2;
      return shares;
    }
    static constexpr int kShares = num_shares();
    static constexpr int kOwnGroups = kGroups / kShares;

   public:
    static constexpr int kCount = kOfAllGroups * kShares;
    /// Whether a thread has one series, which goes on with the first keys of the next step.
    static constexpr bool kGoesOn = kCount <= kThreads && kShares == 1;

    /// Begins series number `number` of the step whose first key is `first_key`.
    FLASHPLAN_DEVICE void begin(int number, int32_t first_key) {
      first_group_ = number / kOfAllGroups * kOwnGroups;
      pairs_ = Pairs(row(number), item(number));
      turns_.begin(item(number), static_cast<uint32_t>(first_key + first_group_ * 8 + row(number)),
                   [](int pair) { return Variant::step(pair); });
    }

    FLASHPLAN_DEVICE void rotate(uint32_t keys) {
      keys += first_group_ * S::Key::kGroupBytes;
      // Loads are issued some blocks ahead, because the compiler does not move a load before a
      // store.
      constexpr int kAhead = kOwnGroups < 4 ? kOwnGroups : 4;
      uint4 ahead[kAhead];
#pragma unroll
      for (int g = 0; g < kAhead; ++g) ahead[g] = load(keys, g);
#pragma unroll
      for (int g = 0; g < kOwnGroups; ++g) {
        const uint4 words = ahead[g % kAhead];
        if (g + kAhead < kOwnGroups) ahead[g % kAhead] = load(keys, g + kAhead);
        pairs_.store(keys + g * S::Key::kGroupBytes, Pairs::rotated(words, turns_.now));
        turns_.advance();
      }
    }

   private:
    FLASHPLAN_DEVICE uint4 load(uint32_t keys, int group) const {
      return pairs_.load(keys + group * S::Key::kGroupBytes);
    }
    static FLASHPLAN_DEVICE int item(int number) { return number % Pairs::kPerRow; }
    /// Neighbouring groups of lanes take rows that are 4 apart, whose chunks lie in different
    /// banks.
    static FLASHPLAN_DEVICE int row(int number) {
      const int k = number / Pairs::kPerRow % 8;
      return k % 2 * 4 + k / 2;
    }

    int first_group_;
    Pairs pairs_;
    FourTurns<Variant> turns_;
  };

  /// Makes what all threads have written visible to wgmma, and arrives at `full`.
  FLASHPLAN_DEVICE void announce(uint32_t full) const {
    fence_async_proxy();  // wgmma reads what was written
    barrier_wait(S::kRotatorBarrier, kThreads);
    if (thread_ == 0) mbarrier_arrive(full);
  }

  /// Rotates the keys of the next step. `begins`: `series` begins anew; else these keys follow
  /// those of the last call.
  FLASHPLAN_DEVICE void rotate_keys(int32_t first_key, bool begins, KeySeries& series) {
    const int32_t step = num_steps_++;
    // Two slots for each earlier step come before these keys. In one ring it is one slot less if
    // the values of the step before come after these keys.
    const int slot = (2 * step - (S::kHasTwoRings ? 0 : follows_)) % S::kSlots;
    follows_ = 1;
    const uint32_t loaded = smem_.key_loaded(step % S::kSlots);
    const uint32_t parity = step / S::kSlots & 1;
    const uint32_t keys = smem_.slot(slot);
    if constexpr (kByFours) {
#pragma unroll 1
      for (int first = 0; first < KeySeries::kCount; first += kThreads) {
        const int number = first + thread_;
        if (begins) series.begin(number, first_key);  // while the keys arrive
        mbarrier_wait(loaded, parity);
        if (number < KeySeries::kCount) series.rotate(keys);
      }
    } else {
      mbarrier_wait(loaded, parity);
      RowRotation<Variant, S::kKv, typename S::Key, S::kHeadDimQk, kThreads, false>::rotate_rows(
          keys, 0, S::kTileKv, thread_,
          [&](int row) { return static_cast<uint32_t>(first_key + row); },
          [](float x, int, int) { return x; });
    }
    announce(smem_.slot_full(slot));
  }

  /// Rotates the queries of a tile for one head, and announces the parts of query buffers at
  /// `q_full` in the order in which Sm90QueryLoader::load_queries() has filled them.
  FLASHPLAN_DEVICE void rotate_queries(const Sm90Context& context, int32_t head) {
    const RowBlock block = context.block();
    const bool is_shared = block.rows.num_rows > 64;
    while (is_shared && place_ % S::kQParts != 0) {
      wait_queries();
      announce(smem_.q_full(place_ % S::kQBarriers));
      ++place_;
    }
    wait_queries();
    for (int part = 1; is_shared && part < S::kQParts; ++part) {
      if (thread_ == 0) mbarrier_arrive(smem_.q_full((place_ + part) % S::kQBarriers));
    }
    const uint32_t queries = smem_.queries(place_);
    const auto position = [&](int row) {
      return block.position + block.rows.query(row, p_.schedule.group_size);
    };
    if constexpr (kByFours && !Variant::kTransformsQuery) {
      using Pairs = FourPairs<Variant, S::kQ, typename S::Query>;
      constexpr int kRowStep = kThreads / Pairs::kPerRow;
      const int item = opaque(thread_) % Pairs::kPerRow;
      const int first_row = opaque(thread_) / Pairs::kPerRow;
      const int end = first_row < kRowStep ? block.rows.num_rows : 0;
      const int32_t group_size = p_.schedule.group_size.value;
      FourTurns<Variant> turns;
      // If the rows of this thread, and so their positions, are evenly spaced, the angles follow
      // from one another.
      if (kRowStep % 8 == 0 && kRowStep % group_size == 0) {
        turns.begin(item, position(first_row), [&](int pair) {
          return rotor(angle_of(Variant::turns(pair), kRowStep / group_size), 1.0F);
        });
        const Pairs pairs(first_row, item);
        uint32_t at = queries;
#pragma unroll 2
        for (int row = first_row; row < end; row += kRowStep) {
          pairs.store(at, Pairs::rotated(pairs.load(at), turns.now));
          turns.advance();
          at += kRowStep / 8 * S::Query::kGroupBytes;
        }
      } else {
#pragma unroll 1
        for (int row = first_row; row < end; row += kRowStep) {
          const Pairs pairs(row, item);
          turns.set(item, position(row));
          pairs.store(queries, Pairs::rotated(pairs.load(queries), turns.now));
        }
      }
    } else {
      const Variant variant(p_);
      const int head_dim = p_.tensors.head_dim_qk;
      RowRotation<Variant, S::kQ, typename S::Query, S::kHeadDimQk, kThreads,
                  Variant::kTransformsQuery>::rotate_rows(queries, 0, block.rows.num_rows, thread_,
                                                          position, [&](float x, int row, int dim) {
                                                            return dim < head_dim
                                                                       ? variant.query(
                                                                             x, element_position(
                                                                                    p_, block.rows,
                                                                                    block.position,
                                                                                    head, row, dim))
                                                                       : x;
                                                          });
    }
    announce(smem_.q_full(place_ % S::kQBarriers));
    place_ += is_shared ? S::kQParts : 1;
  }
  FLASHPLAN_DEVICE void wait_queries() const {
    mbarrier_wait(smem_.q_loaded(place_ % S::kQBarriers), place_ / S::kQBarriers & 1);
  }

  const AttentionParams& p_;
  const Sm90Smem<S> smem_;
  const int thread_;
  int32_t num_steps_ = 0;
  // 1 if the next step follows another step without a break: then, in one ring, the values of that
  // step come after the keys of the next one. Otherwise 0.
  int32_t follows_ = 0;
  int32_t place_ = 0;  // how many parts of query buffers earlier queries have taken
};

}  // namespace flashplan::device
