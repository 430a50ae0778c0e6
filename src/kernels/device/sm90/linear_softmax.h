// SPDX-License-Identifier: Apache-2.0
// Weights of the sm90 family for variants that add a linear function of the key to the logits.
#pragma once

#include "abi/linear_logits.h"
#include "kernels/device/sm90/softmax.h"

namespace flashplan::device {

/// It differs from Sm90Softmax in two ways. The accumulators of the products start with the
/// variant's function of the key instead of zeros, so that it takes no instruction between products
/// and exponentials. They hold the difference from its value at the key behind the step. And where
/// the function grows with the key, the shifts are raised before weights become too large.
template <typename S>
struct Sm90LinearSoftmax : Sm90Softmax<S> {
  using Base = Sm90Softmax<S>;
  using Base::logits;
  using Base::shift;
  using Base::sum;
  using typename Base::Visible;
  static constexpr bool kStartsLogits = true;

  /// Evaluates the variant's function for the rows of one head of a work tile.
  template <typename Variant>
  FLASHPLAN_DEVICE void read_bias(const AttentionParams& p, const Variant& variant,
                                  const Sm90Context& context, int32_t head, int first_row,
                                  int thread) {
    const RowBlock block = context.block();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      LogitPosition at = block.logit_position(p, S::row(first_row, opaque(thread), half), head,
                                              context.segment.qo_len);
      // The reference is the key at the query's own position. A bias is rounded the less the nearer
      // the key is to it, and where the bias grows, the keys near the query weigh most.
      at.key = at.query;
      const OfKey<float> bias = variant.bias(at);
      query_[half] = at.query;
      slope_[half] = bias.slope / scale_of(variant);
      own_bias_[half] = bias.rest * kLog2e;
    }
  }

  /// See Sm90Softmax.
  FLASHPLAN_DEVICE void start(int thread) {
    const auto column = static_cast<float>(opaque(thread) % 4 * 2 - S::kTileKv);
    const float first[2] = {slope_[0] * column, slope_[1] * column};
#pragma unroll
    for (int i = 0; i < S::kTileKv / 2; ++i) {
      const int half = i / 2 % 2;
      logits[i] = __fmaf_rn(slope_[half], static_cast<float>(i / 4 * 8 + i % 2), first[half]);
    }
  }

  /// Computes what weigh_step() needs besides the products of the step, while they run.
  template <typename Variant>
  FLASHPLAN_DEVICE void prepare_step(const Variant& variant, const Visible& visible, int32_t key,
                                     bool is_first) {
    bool raises = is_first || visible.hides(key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto distance = static_cast<float>(key + S::kTileKv - query_[half]);
      bias_[half] = __fmaf_rn(distance * slope_[half], scale_of(variant) * kLog2e, own_bias_[half]);
      relative_[half] = shift[half] - bias_[half];
      raises = raises || relative_[half] < least_[half];
    }
    raises_ = __any_sync(0xffffffffU, raises);
  }

  /// See Sm90Softmax.
  template <typename Variant, typename Again>
  FLASHPLAN_DEVICE bool weigh_step(const AttentionParams& p, const Variant& variant,
                                   const Sm90Context& context, const Visible& visible,
                                   int first_row, int thread, int32_t key, bool is_first,
                                   float (&shrink)[2], Again multiply_again) {
    const float scale = scale_of(variant) * kLog2e;
    shrink[0] = shrink[1] = 1.0F;
    bool is_again = false;
    float added[2];
#pragma unroll 1
    for (;;) {
      if (raises_) {
        asm volatile("");  // a branch, as in Sm90Softmax
        const bool is_masked = visible.hides(key);
        if (is_masked) Base::mask(p, context, visible, first_row, thread, key);
        float largest[2];
        float ahead = 0.0F;
        if (is_first || is_masked || is_again) {
          Base::find_largest(largest);
        } else {
          find_samples(largest);
          ahead = kAhead;
        }
        raise_to(largest, ahead, scale, visible, shrink);
      }
      Base::weigh(scale, relative_, added);
      if (!too_large(added, visible) || is_again) break;
      multiply_again();
      is_again = raises_ = true;
    }
    sum[0] += added[0];
    sum[1] += added[1];
    return raises_;
  }

 private:
  // bfloat16 has the exponents of float32, so its weights may be far from 1. They stay below 2^60,
  // because products with values must not overflow float32.
  static constexpr bool kIsFloat16 = S::kQ == DType::kFloat16;
  static constexpr float kMost = Base::kMost * (kIsFloat16 ? 1.0F : 0x1p50F);
  // When shifts are raised, the largest logits of that step get the weight 2^-kAhead. In later
  // steps the function of the key grows, and the weights grow with it. When they may exceed
  // 2^kSlack, the shifts are raised again.
  static constexpr float kSlack = kIsFloat16 ? 5.0F : 50.0F;
  static constexpr float kAhead = kIsFloat16 ? 6.0F : 60.0F;

  /// The factor of the products. Not 0, so that slopes can be divided by it.
  template <typename Variant>
  static FLASHPLAN_DEVICE float scale_of(const Variant& variant) {
    return fmaxf(variant.scale, 1e-20F);
  }

  static FLASHPLAN_DEVICE bool too_large(const float (&added)[2], const Visible& visible) {
    constexpr float kShare = Base::kMost / kMost;
    return __any_sync(0xffffffffU,
                      added[0] * kShare > visible.most[0] || added[1] * kShare > visible.most[1]);
  }

  /// Raises the shifts to what makes the weights of the largest of these logits 2^-ahead.
  FLASHPLAN_DEVICE void raise_to(const float (&largest)[2], float ahead, float scale,
                                 const Visible& visible, float (&shrink)[2]) {
    float more[2];
    Base::raise_to(largest, more,
                   [&](float x, int half) { return __fmaf_rn(x, scale, bias_[half] + ahead); });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shrink[half] *= more[half];
      relative_[half] = shift[half] - bias_[half];
      const bool is_row = visible.most[half] == Base::kMost;
      least_[half] = is_row ? relative_[half] - (ahead + kSlack) : -infinity();
    }
  }

  /// A few logits of each row, which are representative of a function that grows with the key.
  /// Other logits are seen by their weights.
  FLASHPLAN_DEVICE void find_samples(float (&largest)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = S::kTileKv / 2 - 3 + 2 * half;  // the last column
      largest[half] = fmaxf(logits[last], logits[last - S::kTileKv / 16 * 4]);
    }
  }

  // Of each of this thread's rows.
  int32_t query_[2];   // its position
  float slope_[2];     // what a product grows by from key to key
  float own_bias_[2];  // of the key at the query's own position, in logits of base 2
  float least_[2];     // of relative_, before the shifts are raised
  // Of a step.
  float bias_[2];      // of the key behind its last one, in logits of base 2
  float relative_[2];  // the shifts, less bias_
  bool raises_;        // whether the shifts of this warp are to be raised
};

}  // namespace flashplan::device
