// SPDX-License-Identifier: Apache-2.0
// Online softmax of one warp's rows (Milakov and Gimelshein; FlashAttention).
#pragma once

#include "kernels/device/ptx.h"

namespace flashplan::device {

/// The softmax state of kMmaM * 16 rows; index [m][half] is this lane's row m * 16 + half * 8 +
/// lane / 4. Weights are exp2(scale * logit - shift). The maximum ignores NaN. A logit of NaN or
/// +inf makes the sum NaN, so that lse and o follow from the sum alone (attention_state.h).
template <int kMmaM>
struct OnlineSoftmax {
  float shift[kMmaM][2];  // the largest of scale * logit, or a little less
  float sum[kMmaM][2];    // sum of this lane's weights; after finish(), of all weights of the row

  // The shift before the first key. It is finite, so that masked logits of -inf give no NaN.
  static constexpr float kNoShift = -3e38F;

  FLASHPLAN_DEVICE void reset() {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      shift[m][0] = shift[m][1] = kNoShift;
      sum[m][0] = sum[m][1] = 0.0F;
    }
  }

  /// If the shift of a row is too small for the new logits, raises the shifts and rescales o and
  /// the sums. Must be called before weigh() for these logits. `peers`: RowPeers.
  template <int kKeyTiles, int kDimTiles, typename Peers>
  FLASHPLAN_DEVICE void rescale(const float (&s)[kMmaM][kKeyTiles][4],
                                float (&o)[kMmaM][kDimTiles][4], float scale, const Peers& peers) {
    // A shift that is too small by up to 8 leaves weights of up to 2^8, which float32 sums and
    // 16-bit products can hold. Only larger maxima lead to rescaling, so shuffles and passes over o
    // are rare.
    constexpr float kSlack = 8.0F;
    float largest[kMmaM][2];  // largest logits in this lane's columns
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
        // A tree of maxima has less latency than a chain.
#pragma unroll
        for (int distance = 1; distance < kKeyTiles; distance *= 2) {
#pragma unroll
          for (int n = 0; n + distance < kKeyTiles; n += 2 * distance) {
            pairs[n] = fmaxf(pairs[n], pairs[n + distance]);
          }
        }
        largest[m][half] = pairs[0];
        grows |= __fmaf_rn(pairs[0], scale, -shift[m][half]) > kSlack;
      }
    }
    if (peers.any(grows)) {
      peers.max_of_rows(largest);
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float new_shift = fmaxf(shift[m][half], largest[m][half] * scale);
          const float shrink = exp2_fast(shift[m][half] - new_shift);
          shift[m][half] = new_shift;
          sum[m][half] *= shrink;
#pragma unroll
          for (int n = 0; n < kDimTiles; ++n) {
            o[m][n][2 * half] *= shrink;
            o[m][n][2 * half + 1] *= shrink;
          }
        }
      }
    }
  }

  /// Turns the logits of tiles [kBegin, kEnd) into weights.
  template <int kBegin, int kEnd, int kKeyTiles>
  FLASHPLAN_DEVICE void weigh(float (&s)[kMmaM][kKeyTiles][4], float scale) {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = kBegin; n < kEnd; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = s[m][n][2 * half + j];
            x = exp2_fast(__fmaf_rn(x, scale, -shift[m][half]));
          }
        }
      }
    }
    // Two chains of additions have less latency than one.
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float added[2] = {s[m][kBegin][2 * half], s[m][kBegin][2 * half + 1]};
#pragma unroll
        for (int n = kBegin + 1; n < kEnd; ++n) {
          added[0] += s[m][n][2 * half];
          added[1] += s[m][n][2 * half + 1];
        }
        sum[m][half] += added[0] + added[1];
      }
    }
  }

  /// Adds the sums of all lanes and warps that share a row.
  template <typename Peers>
  FLASHPLAN_DEVICE void finish(const Peers& peers) {
    peers.sum_of_rows(sum);
  }
};

}  // namespace flashplan::device
