// SPDX-License-Identifier: Apache-2.0
// The ring of slots in shared memory through which keys and values arrive.
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/prepared.h"
#include "kernels/device/sm90/shape.h"

namespace flashplan::device {

/// The ring as a consumer warpgroup sees it, or both rings where keys and values have rings of
/// their own. Slots are numbered, and each has the keys (`is_key`) or the values of one step.
template <typename S>
class Sm90SlotRing {
 public:
  /// If the ring of this kernel has fewer slots when keys are prepared, waits for the first record
  /// of the queue, which says whether keys are prepared.
  FLASHPLAN_DEVICE Sm90SlotRing(const AttentionParams& p, const Sm90Smem<S>& smem) : smem_(smem) {
    if constexpr (S::kPreparedSlots < S::kSlots) {
      if (Sm90Prepared<S>::is_in_use(p, smem)) num_slots_ = S::kPreparedSlots;
    }
    if constexpr (S::kHasTwoRings) places_[1].slot = 1;
  }

  FLASHPLAN_DEVICE uint32_t address(int slot) const { return smem_.slot(slot); }
  /// The mbarrier phase that completes when the next slot is full.
  FLASHPLAN_DEVICE MbarrierPhase next_full(bool is_key) const {
    const Place& place = places_[ring_of(is_key)];
    return {smem_.slot_full(place.slot), place.parity};
  }
  /// Returns the next slot, and advances to the slot after it if `takes` is true. It does not wait
  /// until the slot is full. It has no branch, so that the compiler keeps the number in a uniform
  /// register.
  FLASHPLAN_DEVICE int take(bool is_key, bool takes) {
    const int ring = ring_of(is_key);
    Place& place = places_[ring];
    const int slot = place.slot;
    const int next = slot + static_cast<int>(takes) * kRings;
    const bool wraps = next == (S::kPreparedSlots < S::kSlots ? num_slots_ : S::kSlots) + ring;
    place.slot = wraps ? ring : next;
    place.parity ^= static_cast<uint32_t>(wraps);
    return slot;
  }
  static FLASHPLAN_DEVICE void wait(MbarrierPhase full) {
    mbarrier_wait(full.barrier, full.parity);
    if constexpr (S::kGathers || S::kWidens) fence_async_proxy();
  }
  static FLASHPLAN_DEVICE void wait(MbarrierPhase a, MbarrierPhase b) {
    mbarrier_wait(a, b);
    if constexpr (S::kGathers || S::kWidens) fence_async_proxy();
  }
  /// Waits until the next slot is full, returns its number, and advances to the slot after it.
  FLASHPLAN_DEVICE int next(bool is_key) {
    wait(next_full(is_key));
    return take(is_key, true);
  }

 private:
  static constexpr int kRings = S::kHasTwoRings ? 2 : 1;
  /// The number of the ring with the keys or the values; it is also the number of its first slot.
  static FLASHPLAN_DEVICE int ring_of(bool is_key) { return S::kHasTwoRings && !is_key ? 1 : 0; }

  struct Place {
    int slot;
    uint32_t parity;
  };

  const Sm90Smem<S> smem_;
  int num_slots_ = S::kSlots;
  Place places_[kRings] = {};
};

}  // namespace flashplan::device
