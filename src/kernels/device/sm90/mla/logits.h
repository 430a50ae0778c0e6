// SPDX-License-Identifier: Apache-2.0
// Logits of the rows of one warp, by mma.sync, because wgmma takes a whole warpgroup.
#pragma once

#include "kernels/device/numeric.h"
#include "kernels/device/sm90/mla/shared_memory.h"

namespace flashplan::device {

/// Adds to `logits` the products of a warp's 16 queries with all keys of a block. `thread`: the
/// thread's number in the warpgroup.
template <typename S>
FLASHPLAN_DEVICE void add_mla_logits_of_warp(const MlaSmem<S>& smem, uint32_t block, int thread,
                                             float (&logits)[S::kTileKv / 2]) {
  const int lane = thread % 32;
  const uint32_t q = smem.queries() + (thread / 32 * 16 + lane % 16) * 128;
  constexpr int kBlocksOfHalf = S::Half::kBlocks;
#pragma unroll 1
  for (int step = 0; step < S::kHeadDimQk / 16; ++step) {
    uint32_t a[4];
    const int chunk = step % 4 * 2;
    const int dims = step / 4;  // number of the group of 64 dims
    ldmatrix(a, q + dims * S::Query::kBlockBytes + (((chunk + lane / 16) ^ lane) % 8 << 4));
    const bool is_tail = dims >= 2 * kBlocksOfHalf;
    const int group_bytes = is_tail ? S::Tail::kGroupBytes : S::Half::kGroupBytes;
    const uint32_t k = smem.half(block, dims / kBlocksOfHalf) +
                       dims % kBlocksOfHalf * S::Half::kBlockBytes + lane / 16 * group_bytes +
                       lane % 8 * 128 + (((chunk + lane / 8 % 2) ^ lane) % 8 << 4);
#pragma unroll
    for (int n = 0; n < S::kTileKv / 8; n += 2) {
      uint32_t b[4];
      ldmatrix(b, k + n * group_bytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float (&d)[4] = reinterpret_cast<float (&)[4]>(logits[4 * (n + i)]);
        Element<S::kQ>::mma(d, a, b[2 * i], b[2 * i + 1]);
      }
    }
  }
}

}  // namespace flashplan::device
