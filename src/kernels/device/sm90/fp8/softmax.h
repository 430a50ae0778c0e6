// SPDX-License-Identifier: Apache-2.0
// Online softmax with weights that are rounded to float8_e4m3fn.
#pragma once

#include "kernels/device/sm90/softmax.h"

namespace flashplan::device {

/// Weights are at most 2^kAhead when the shift of their row is raised, not 1: so those that are
/// 2^17 times smaller than the largest are still numbers of e4m3. Later ones may be larger, as long
/// as e4m3 has them.
template <typename S>
struct Sm90Fp8Softmax : Sm90Softmax<S> {
  using Base = Sm90Softmax<S>;
  using typename Base::Visible;
  static constexpr float kAhead = 8.0F;
  static constexpr float kMostLog2 = 8.8F;  // 2^8.8 < 448

  /// Turns the logits of the keys from `key` on into weights and adds them up. Returns whether the
  /// shifts were raised: the caller then multiplies o by `shrink`.
  template <typename Variant>
  FLASHPLAN_DEVICE bool weigh_step(const AttentionParams& p, const Variant& variant,
                                   const Sm90Context& context, const Visible& visible,
                                   int first_row, int thread, int32_t key, bool is_first,
                                   float (&shrink)[2]) {
    this->transform(variant);
    if (visible.may_hide(key)) {
      asm volatile("");  // keeps this a branch instead of selects in every step
      this->mask(p, context, visible, first_row, thread, key);
    }
    const float scale = variant.exp2_scale;
    float largest[2];
    this->find_largest(largest);
    bool too_large = is_first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows of padding have no limit: they must not change the other rows of their warp.
      const bool has_limit = visible.most[half] != infinity();
      too_large |= has_limit && largest[half] * scale - this->shift[half] > kMostLog2;
    }
    const bool raises = __any_sync(0xffffffffU, too_large) != 0;
    if (raises) raise_to_e4m3(largest, scale, shrink);
    float added[2];
    this->weigh(scale, added);
    this->sum[0] += added[0];
    this->sum[1] += added[1];
    return raises;
  }

 private:
  FLASHPLAN_DEVICE void raise_to_e4m3(const float (&largest)[2], float scale, float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = largest[half];
      x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
      const float raised = fmaxf(this->shift[half], x * scale - kAhead);
      shrink[half] = exp2_fast(this->shift[half] - raised);
      this->shift[half] = raised;
      this->sum[half] *= shrink[half];
    }
  }
};

}  // namespace flashplan::device
