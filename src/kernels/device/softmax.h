// SPDX-License-Identifier: Apache-2.0
// Online softmax of one warp's rows (Milakov and Gimelshein; FlashAttention).
#pragma once

#include "kernels/device/ptx.h"

namespace flashplan::device {

/// Largest value of a row over the four lanes that hold it.
FLASHPLAN_DEVICE float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}

FLASHPLAN_DEVICE float sum_of_quad(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

/// What is subtracted from a row's logits: nothing where no key was seen.
FLASHPLAN_DEVICE float shift_of(float row_max) { return row_max == -infinity() ? 0.0F : row_max; }

/// State of kMmaM * 16 rows; index [m][half]: this lane's rows m * 16 + half * 8 + lane / 4.
/// Logits are in units of 1 / scale; weights are exp2(scale * (logit - max)), where `max` is the
/// largest logit or a little less.
template <int kMmaM>
struct OnlineSoftmax {
  float max[kMmaM][2];
  float sum[kMmaM][2];  // of this lane's columns alone, until finish()

  FLASHPLAN_DEVICE void reset() {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      max[m][0] = max[m][1] = -infinity();
      sum[m][0] = sum[m][1] = 0.0F;
    }
  }

  /// Turns the logits of further keys into weights, and scales o and the sums for them.
  template <int kKeyTiles, int kDimTiles>
  FLASHPLAN_DEVICE void update(float (&s)[kMmaM][kKeyTiles][4], float (&o)[kMmaM][kDimTiles][4],
                               float scale) {
    // `max` need not be the maximum: one that is 2^8 too small leaves weights that float32 sums and
    // 16-bit products can hold. So as a rule no lane asks the others, and o is not touched.
    constexpr float kSlack = 8.0F;
    float largest[kMmaM][2];  // of this lane's columns
    bool grows = false;
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float pairs[kKeyTiles];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          pairs[n] = fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]);
        }
        // A tree: the latency of a chain would show.
#pragma unroll
        for (int distance = 1; distance < kKeyTiles; distance *= 2) {
#pragma unroll
          for (int n = 0; n + distance < kKeyTiles; n += 2 * distance) {
            pairs[n] = fmaxf(pairs[n], pairs[n + distance]);
          }
        }
        largest[m][half] = pairs[0];
        // Also true for the first key: inf > 8. False for -inf - -inf.
        grows |= (pairs[0] - max[m][half]) * scale > kSlack;
      }
    }
    if (__any_sync(0xffffffffU, grows)) {
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float new_max = fmaxf(max[m][half], max_of_quad(largest[m][half]));
          const float shrink =
              exp2_fast((max[m][half] - shift_of(new_max)) * scale);  // 0 from -inf
          max[m][half] = new_max;
          sum[m][half] *= shrink;
#pragma unroll
          for (int n = 0; n < kDimTiles; ++n) {
            o[m][n][2 * half] *= shrink;
            o[m][n][2 * half + 1] *= shrink;
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = shift_of(max[m][half]) * scale;
        float added[2] = {0.0F, 0.0F};
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = s[m][n][2 * half + j];
            x = exp2_fast(__fmaf_rn(x, scale, -shift));
            added[j] += x;
          }
        }
        sum[m][half] += added[0] + added[1];
      }
    }
  }

  /// Completes the sums.
  FLASHPLAN_DEVICE void finish() {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] = sum_of_quad(sum[m][half]);
    }
  }
};

}  // namespace flashplan::device
