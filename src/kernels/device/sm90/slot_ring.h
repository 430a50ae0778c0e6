// SPDX-License-Identifier: Apache-2.0
// The ring of slots in shared memory through which keys and values arrive.
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/prepared.h"
#include "kernels/device/sm90/shape.h"

namespace flashplan::device {

/// The ring as a consumer warpgroup sees it. A slot is a number, and has the keys or the values of
/// one step.
template <typename S>
class Sm90SlotRing {
 public:
  /// Where the ring may have fewer slots, waits for the first record of the queue, which says so.
  FLASHPLAN_DEVICE Sm90SlotRing(const AttentionParams& p, const Sm90Smem<S>& smem) : smem_(smem) {
    if constexpr (S::kPreparedSlots < S::kSlots) {
      if (Sm90Prepared<S>::is_in_use(p, smem)) num_slots_ = S::kPreparedSlots;
    }
  }

  FLASHPLAN_DEVICE uint32_t address(int slot) const { return smem_.slot(slot); }
  /// The mbarrier phase that completes when the next slot is full.
  FLASHPLAN_DEVICE MbarrierPhase next_full() const { return {smem_.slot_full(slot_), parity_}; }
  /// Returns the next slot, and advances to the slot after it if `takes` is true. It does not wait
  /// until the slot is full. It has no branch, so that the compiler keeps the number in a uniform
  /// register.
  FLASHPLAN_DEVICE int take(bool takes) {
    const int slot = slot_;
    const int next = slot + static_cast<int>(takes);
    const bool wraps = next == (S::kPreparedSlots < S::kSlots ? num_slots_ : S::kSlots);
    slot_ = wraps ? 0 : next;
    parity_ ^= static_cast<uint32_t>(wraps);
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
  /// The next slot, once it is full.
  FLASHPLAN_DEVICE int next() {
    wait(next_full());
    return take(true);
  }

 private:
  const Sm90Smem<S> smem_;
  int num_slots_ = S::kSlots;
  int slot_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace flashplan::device
