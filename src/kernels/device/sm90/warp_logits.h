// SPDX-License-Identifier: Apache-2.0
// Logits of the rows of one warp, by mma.sync: wgmma takes a whole warpgroup.
#pragma once

#include "kernels/device/numeric.h"
#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/shape.h"

namespace flashplan::device {

/// Adds to `logits` the products of a warp's 16 rows of queries with all keys of a step. `queries`:
/// address of the queries of its warpgroup. `thread`: number of this thread in the warpgroup.
template <typename S>
FLASHPLAN_DEVICE void add_logits_of_warp(uint32_t queries, uint32_t keys, int thread,
                                         float (&logits)[S::kTileKv / 2]) {
  const int lane = thread % 32;
  const uint32_t q = queries + (thread / 32 * 16 + lane % 16) * 128;
  const uint32_t k = keys + lane / 16 * S::Key::kGroupBytes + lane % 8 * 128;
#pragma unroll 1
  for (int step = 0; step < S::kHeadDimQk / 16; ++step) {
    uint32_t a[4];
    const int chunk = step % 4 * 2;
    ldmatrix(a, q + step / 4 * S::Query::kBlockBytes + (((chunk + lane / 16) ^ lane) % 8 << 4));
#pragma unroll
    for (int n = 0; n < S::kTileKv / 8; n += 2) {
      uint32_t b[4];
      ldmatrix(b, k + n * S::Key::kGroupBytes + step / 4 * S::Key::kBlockBytes +
                      (((chunk + lane / 8 % 2) ^ lane) % 8 << 4));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float (&d)[4] = reinterpret_cast<float (&)[4]>(logits[4 * (n + i)]);
        Element<S::kQ>::mma(d, a, b[2 * i], b[2 * i + 1]);
      }
    }
  }
}

}  // namespace flashplan::device
