// SPDX-License-Identifier: Apache-2.0
// Online softmax of the sm90_wide family, which computes no logits again.
#pragma once

#include "kernels/device/sm90/softmax.h"

namespace flashplan::device {

/// The values of a step overwrite its keys as soon as its logits have been computed, so logits
/// cannot be computed again. Sm90Softmax does this when weights with the shifts of earlier steps
/// come out too large. Here the largest logit is looked up in each step instead, before weights are
/// computed. Shifts are raised where some weight would be larger than kMost.
template <typename S>
struct WideSoftmax : Sm90Softmax<S> {
  using Base = Sm90Softmax<S>;
  using typename Base::Visible;

  /// Turns the logits of a step into weights. Parameters and result are those of
  /// Sm90Softmax::weigh_step(), but `multiply_again` is never called.
  template <typename Variant, typename Again>
  FLASHPLAN_DEVICE bool weigh_step(const AttentionParams& p, const Variant& variant,
                                   const Sm90Context& context, const Visible& visible,
                                   int first_row, int thread, int32_t key, bool is_first,
                                   float (&shrink)[2], const Again& /*multiply_again*/) {
    this->transform(variant);
    if (visible.may_hide(key)) {
      asm volatile("");  // keeps this a branch instead of selects in every step
      this->mask(p, context, visible, first_row, thread, key);
    }
    float largest[2];
    this->find_largest(largest);
    const float scale = variant.exp2_scale;
    const bool raised = is_first || too_large(largest, scale, visible);
    if (raised) this->raise_to(largest, scale, shrink);
    float added[2];
    this->weigh(scale, added);
    this->sum[0] += added[0];
    this->sum[1] += added[1];
    return raised;
  }

 private:
  static constexpr float kMostBits = 10;  // exp2(kMostBits) = kMost
  static_assert(Base::kMost == 1024.0F);

  /// Whether some weight of the warp's rows would be larger than kMost. Rows of padding do not
  /// count, since their queries may be those of another request.
  FLASHPLAN_DEVICE bool too_large(const float (&largest)[2], float scale,
                                  const Visible& visible) const {
    bool is_large = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float bits = __fmaf_rn(largest[half], scale, -this->shift[half]);
      is_large = is_large || (bits > kMostBits && visible.most[half] == Base::kMost);
    }
    return __any_sync(0xffffffffU, is_large);
  }
};

}  // namespace flashplan::device
