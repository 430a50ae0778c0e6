// SPDX-License-Identifier: Apache-2.0
// Copies prepared keys and values (abi/prepared_kv.h) to shared memory.
#pragma once

#include "kernels/device/sm90/prepared.h"
#include "kernels/device/sm90/producer_warp.h"
#include "kernels/device/sm90/ring_position.h"

namespace flashplan::device {

/// A producer warp that copies prepared keys, or prepared values, to the slots of the ring: one
/// bulk copy for each tile.
template <typename S, bool kIsKey>
class Sm90PreparedLoader : Sm90ProducerWarp<S> {
  using Base = Sm90ProducerWarp<S>;

 public:
  using Base::Base;

  /// Copies prepared keys (`kIsKey`), or prepared values, to their slots of the ring. Other warps
  /// fill the slots of the other kind, and all slots of work tiles that are not prepared; this warp
  /// skips them. The slot after the keys of a step has the values of the step before.
  /// `num_arrivals`: the arrivals that the mbarrier of a slot waits for.
  FLASHPLAN_DEVICE void run(int num_arrivals) {
    num_arrivals_ = num_arrivals;
    int32_t last_tile = kNoTile;  // the tile of the step before, whose values are not loaded yet
    int32_t last_head = 0;
    for (int32_t i = 0;; ++i) {
      const Sm90Context& context = wait_context(i);
      if (context.has_steps()) {
        const bool is_own = !S::kWidens || is_prepared(i);
        const int32_t num_steps = context.num_steps(S::kTileKv);
        const int32_t first_tile =
            is_own ? first_prepared(i) + Sm90PreparedRange<S>(context.tile).begin : 0;
        const int32_t heads_end = context.tile.kv_head + context.tile.num_kv_heads;
        for (int32_t head = context.tile.kv_head; head < heads_end; ++head) {
          for (int32_t step = 0; step < num_steps; ++step) {
            const int32_t tile = is_own ? first_tile + step : kNotPrepared;
            take_slot(true, tile, head);
            if (last_tile != kNoTile) take_slot(false, last_tile, last_head);
            last_tile = tile;
            last_head = head;
          }
        }
      } else if (last_tile != kNoTile) {
        // Before a tile without steps, and before the end, the consumers finish the last tile with
        // steps, so they wait for its last values.
        take_slot(false, last_tile, last_head);
        last_tile = kNoTile;
      }
      if (context.is_end) return;
      release_context(i);
    }
  }

 private:
  using Base::first_prepared;
  using Base::is_prepared;
  using Base::lane_;
  using Base::p_;
  using Base::release_context;
  using Base::smem_;
  using Base::wait_context;

  static constexpr int32_t kNoTile = kNotPrepared - 1;

  /// Fills the next slot of the ring if this warp has to, and goes on to the slot after it. `tile`:
  /// the number of the prepared tile whose keys or values belong to the slot, or kNotPrepared.
  FLASHPLAN_DEVICE void take_slot(bool is_key, int32_t tile, int32_t head) {
    if (is_key == kIsKey && (!S::kWidens || tile != kNotPrepared)) load(tile, head);
    if constexpr (S::kWidens) {
      ring_.skip(1);
      return;
    }
    parity_ ^= static_cast<uint32_t>((slot_ + 1) / S::kPreparedSlots);
    slot_ = (slot_ + 1) % S::kPreparedSlots;
  }
  FLASHPLAN_DEVICE void load(int32_t tile, int32_t head) {
    constexpr int kBytes = kIsKey ? S::kKeyBytes : S::kValueBytes;
    const PreparedKv& kv = p_.prepared;
    wait_ready(tile, head);
    int slot = slot_;
    if constexpr (S::kWidens) {
      slot = ring_.wait_free(smem_, lane_);
    } else {
      mbarrier_wait(smem_.slot_empty(slot_), parity_);
    }
    if (lane_ != 0) return;
    const uint32_t full = smem_.slot_full(slot);
    const unsigned char* const tiles = kIsKey ? kv.keys : kv.values;
    mbarrier_arrive_expect(full, kBytes, num_arrivals_);
    bulk_load(smem_.slot(slot), tiles + (int64_t{tile} * kv.num_kv_heads + head) * kBytes, kBytes,
              full);
  }

  /// Waits until a tile is ready. It loads the counters of 32 tiles at once, because one load takes
  /// nearly as long as the consumers need for a step of keys.
  FLASHPLAN_DEVICE void wait_ready(int32_t tile, int32_t head) {
    const auto distance = static_cast<uint32_t>(tile - first_seen_);
    const bool is_known = head == head_seen_ && distance < 32 && (ready_ >> distance & 1) != 0;
    if (is_known) return;
    ready_ = wait_for_first(p_, smem_.on_pages(), tile, head);
    first_seen_ = tile;
    head_seen_ = head;
  }
  /// Waits until `tile` is ready. Bit i of the result says whether tile number `tile` + i is ready,
  /// for 32 tiles. If some of these have keys whose page ids are outside of the cache, tells the
  /// consumers.
  static __device__ __noinline__ uint32_t wait_for_first(const AttentionParams& p,
                                                         uint32_t on_pages, int32_t tile,
                                                         int32_t head) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const PreparedState* state = Sm90Prepared<S>::state(p, tile + lane, head);
    uint32_t ready = 0;
    int32_t parts = 0;
    while ((ready & 1) == 0) {
      parts = load_acquire(kIsKey ? &state->keys : &state->values);
      ready = __ballot_sync(0xffffffffU, parts % kPartOffPages == Sm90Prepared<S>::kParts);
    }
    if (__any_sync(0xffffffffU, parts >= kPartOffPages)) {
      store_shared_4(on_pages, kSomeOffPages);
    }
    __syncwarp();
    fence_async_proxy_of_all_memory();  // before bulk copies read the tiles
    return ready;
  }

  Sm90RingPosition<S> ring_;  // if S::kWidens, used instead of slot_ and parity_
  int num_arrivals_ = 0;
  int slot_ = 0;            // the next slot
  uint32_t parity_ = 1;     // parity of the phase in which that slot is freed
  int32_t first_seen_ = 0;  // the first of the 32 tiles that ready_ tells of, of kv head head_seen_
  int32_t head_seen_ = -1;
  uint32_t ready_ = 0;  // a bit for each tile from first_seen_ on: whether it is ready
};

}  // namespace flashplan::device
