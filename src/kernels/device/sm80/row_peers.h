// SPDX-License-Identifier: Apache-2.0
// Exchanges values between lanes and warps that compute different columns of the same rows.
#pragma once

#include "kernels/device/sm80/tile_context.h"
#include "kernels/device/sm80/warp_mma.h"

namespace flashplan::device {

/// S::kWarpsVo warps share rows. Each computes the logits of some of the keys, and the products
/// with some of the dims of v. For the products it needs the weights of all keys, so weights are
/// exchanged in shared memory. Within a warp, four lanes share a row. Index [m][half] is a lane's
/// row m * 16 + half * 8 + lane / 4 of the warp.
template <typename S>
class RowPeers {
 public:
  using Rows = float[S::kMmaM][2];

  /// `memory` in shared memory has S::kPeerBytes for each warp.
  FLASHPLAN_DEVICE RowPeers(uint32_t memory, int thread)
      : at_(thread), memory_(memory + at_.warp_q * S::kWarpsVo * S::kPeerBytes) {}

  /// Waits for all warps that share rows.
  FLASHPLAN_DEVICE void wait() const {
    if constexpr (S::kWarpsVo == 1) {
      __syncwarp();
    } else {
      barrier_wait(barrier(), S::kWarpsVo * 32);
    }
  }
  /// Waits for all warps that share rows. Returns whether `x` is true in any of their lanes.
  FLASHPLAN_DEVICE bool any(bool x) const {
    if constexpr (S::kWarpsVo == 1) {
      return __any_sync(0xffffffffU, x);
    } else {
      return barrier_any(barrier(), S::kWarpsVo * 32, x);
    }
  }
  FLASHPLAN_DEVICE void max_of_rows(Rows& x) const {
    combine(x, [](float a, float b) { return fmaxf(a, b); });
  }
  FLASHPLAN_DEVICE void sum_of_rows(Rows& x) const {
    combine(x, [](float a, float b) { return a + b; });
  }

  /// Stores this warp's weights, and waits for those of all warps that share rows. A wait() or
  /// any() must come between load_weights() and the next exchange(), which overwrites the weights.
  template <DType kWeight, int kTiles>
  FLASHPLAN_DEVICE void exchange(const float (&weights)[S::kMmaM][kTiles][4]) const {
    constexpr int kSteps = kTiles / 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int m = 0; m < S::kMmaM; ++m) {
        uint32_t a[4];
        pack_weights<kWeight>(a, weights[m][2 * step], weights[m][2 * step + 1]);
        store_shared_16(fragment_address(at_.warp_vo * kSteps + step, m), {a[0], a[1], a[2], a[3]});
      }
    }
    wait();
  }
  /// Loads the weights of 16 query rows (number m) and 16 keys (number `step`).
  FLASHPLAN_DEVICE void load_weights(uint32_t (&a)[4], int m, int step) const {
    const uint4 loaded = load_shared_16(fragment_address(step, m));
    a[0] = loaded.x;
    a[1] = loaded.y;
    a[2] = loaded.z;
    a[3] = loaded.w;
  }

 private:
  // The named barrier of the warps that share rows. Barrier 0 is used by __syncthreads().
  FLASHPLAN_DEVICE int barrier() const { return 1 + at_.warp_q; }
  FLASHPLAN_DEVICE uint32_t fragment_address(int step, int m) const {
    return memory_ + ((step * S::kMmaM + m) * 32 + at_.lane) * 16;
  }
  FLASHPLAN_DEVICE uint32_t row_address(int warp_vo, int m, int half) const {
    return memory_ + ((warp_vo * S::kMmaM + m) * 2 + half) * 32 + at_.lane / 4 * 4;
  }

  template <typename Function>
  FLASHPLAN_DEVICE void combine(Rows& x, Function f) const {
    for_each(x, [&](float& own, int, int) {
      own = f(own, __shfl_xor_sync(0xffffffffU, own, 1));
      own = f(own, __shfl_xor_sync(0xffffffffU, own, 2));
    });
    if constexpr (S::kWarpsVo > 1) {
      static_assert(S::kWarpsVo == 2);
      wait();  // the other warp has read the earlier weights
      for_each(x, [&](float own, int m, int half) {
        if (at_.lane % 4 == 0) {
          store_shared_4(row_address(at_.warp_vo, m, half), __float_as_uint(own));
        }
      });
      wait();
      for_each(x, [&](float& own, int m, int half) {
        own = f(own, __uint_as_float(load_shared_4(row_address(1 - at_.warp_vo, m, half))));
      });
      wait();  // the other warp has read these values, so weights may overwrite them
    }
  }
  template <typename Function>
  static FLASHPLAN_DEVICE void for_each(Rows& x, Function f) {
#pragma unroll
    for (int m = 0; m < S::kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) f(x[m][half], m, half);
    }
  }

  const WarpPlace<S> at_;
  const uint32_t memory_;  // address of the memory of the warps that share these rows
};

}  // namespace flashplan::device
