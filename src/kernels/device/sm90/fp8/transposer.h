// SPDX-License-Identifier: Apache-2.0
// The warpgroup of the sm90_fp8 family that transposes values in their slots.
#pragma once

#include "kernels/device/sm90/fp8/shape.h"
#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/shared_memory.h"

namespace flashplan::device {

/// Values arrive as rows of keys. Products need rows of dims, in which the keys have the order that
/// the weights have in registers: of each 16 keys, those with the numbers 2 t, 2 t + 1, 2 t + 8 and
/// 2 t + 9 are neighbours.
template <typename S>
class Sm90Transposer {
 public:
  FLASHPLAN_DEVICE explicit Sm90Transposer(const Sm90Smem<S>& smem)
      : smem_(smem), thread_(static_cast<int>(threadIdx.x) % 128) {}

  /// Transposes the values of all steps, in the order in which they are loaded.
  FLASHPLAN_DEVICE void run() const {
#pragma unroll 1
    for (uint32_t step = 0;; ++step) {
      const uint32_t entry = step % S::kSlots;
      mbarrier_wait(smem_.key_loaded(entry), step / S::kSlots & 1);
      const auto slot = static_cast<int32_t>(load_shared_4(smem_.value_slot(entry)));
      if (slot == S::kNoSlot) return;
      transpose(smem_.slot(slot));
      fence_async_proxy();  // wgmma reads them
      barrier_wait(S::kTransposerBarrier, 128);
      if (thread_ == 0) mbarrier_arrive(smem_.slot_full(slot));
    }
  }

 private:
  /// Each warp takes 32 of the keys.
  FLASHPLAN_DEVICE void transpose(uint32_t tile) const {
    constexpr int kPairs = S::kHeadDimVo / 32;  // of 16-byte chunks of a key's row
    static_assert(S::kTileKv == 128);
    // Addresses are computed in each step: held meanwhile, they would take too many registers.
    const int thread = opaque(thread_);
    const int lane = thread % 32;
    const int first = thread / 32 * 2;  // of the warp's groups of 16 keys
    uint32_t words[2][kPairs][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int key = (first + i) * 16 + lane / 8 % 2 * 8 + lane % 8;
        ldmatrix_transposed(words[i][pair], tile + S::Value::offset(key, 2 * pair + lane / 16));
      }
    }
    barrier_wait(S::kTransposerBarrier, 128);  // all have read
    // A word has the even and the odd dim of one key, then those of the next key. Of 16 dims, the
    // even ones of the first 8 are stored together with the odd ones of the others: the same bytes
    // of all 8 rows are then in different banks.
    const bool is_first = lane < 16;
    const uint32_t even_first = is_first ? 0x6420 : 0x7531;
    const uint32_t odd_first = is_first ? 0x7531 : 0x6420;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint32_t (&w)[4] = words[i][pair];
        const int dim = (2 * pair + lane / 16) * 16 + lane % 8 * 2 + (lane / 8 % 2 ^ lane % 8 / 4);
        stmatrix(tile + S::TransposedValue::offset(dim, first + i),
                 __byte_perm(w[0], w[1], even_first), __byte_perm(w[0], w[1], odd_first),
                 __byte_perm(w[2], w[3], even_first), __byte_perm(w[2], w[3], odd_first));
      }
    }
  }

  const Sm90Smem<S> smem_;
  const int thread_;
};

}  // namespace flashplan::device
