// SPDX-License-Identifier: Apache-2.0
// A place in the ring of slots, for warps that fill the slots of some work tiles only.
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/shared_memory.h"

namespace flashplan::device {

/// The position of a warp in the ring: how many slots were taken since the queue began. Position n
/// is free when the consumers have freed position n - kSlots, which has the same slot. Parity tells
/// only two phases of a slot apart, so a warp may wait for this by parity only if it knows that
/// position n - 2 * kSlots was freed. It knows this if it has found position n - 2, or a later one,
/// free: consumers free slots in the order of positions, with one exception (the last values of a
/// tile are freed before the first keys of the next one, which come one position earlier). A warp
/// that has skipped more positions first waits until another warp, which filled these, has found
/// position n - 2 free: Sm90SharedMemory::free_position is the last position that any warp has
/// found free. It will reach n - 2, because the warps that fill the positions before n do not wait
/// for position n.
template <typename S>
class Sm90RingPosition {
 public:
  static_assert(!S::kWidens || S::kPreparedSlots == S::kSlots);

  FLASHPLAN_DEVICE void skip(uint32_t count) { position_ += count; }

  /// Waits until the slot of this position is free, and returns its number.
  FLASHPLAN_DEVICE int wait_free(const Sm90Smem<S>& smem, int lane) {
    const uint32_t position = position_;
    if (position - last_free_ > kLead) {
      while (load_shared_relaxed_4(smem.free_position()) + kLead < position) {
      }
    }
    last_free_ = position;
    const uint32_t slot = position % S::kSlots;
    mbarrier_wait(smem.slot_empty(slot), (position / S::kSlots & 1) ^ 1);
    if (lane == 0) atomicMax(&smem.memory.free_position, position);
    return static_cast<int>(slot);
  }

 private:
  static constexpr uint32_t kLead = 2;

  uint32_t position_ = 0;
  uint32_t last_free_ = 0;  // the last position that this warp has waited for
};

}  // namespace flashplan::device
