// SPDX-License-Identifier: Apache-2.0
// Weights of the sm90 family for variants whose bodies read positions, or that have no softmax.
#pragma once

#include "kernels/device/sm90/softmax.h"

namespace flashplan::device {

/// For variants with a softmax this differs from Sm90Softmax in two ways. In a step in which every
/// row sees every key, a logit goes through the variant's own code right before its weight is
/// computed, so that this code runs beside the exponentials. And where logits grow with the key, as
/// those of ALiBi do, the shifts are raised ahead of them. Sm90Softmax raises them only after the
/// weights of a step came out too large, and must then compute the step again. For variants without
/// a softmax there are neither shifts nor sums.
template <typename S>
struct Sm90VariantSoftmax : Sm90Softmax<S> {
  using Base = Sm90Softmax<S>;
  using Base::logits;
  using Base::shift;
  using Base::sum;
  using typename Base::Visible;

  /// Begins the softmax of a head of a work tile.
  FLASHPLAN_DEVICE void begin(const AttentionParams& p, const Sm90Context& context, int32_t head,
                              int first_row, int thread) {
    Base::reset();
    const RowBlock block = context.block();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_[half] = block.logit_position(p, S::row(first_row, opaque(thread), half), head,
                                         context.segment.qo_len);
    }
  }

  /// Turns the logits of a step into weights. Parameters and result are those of
  /// Sm90Softmax::weigh_step().
  template <typename Variant, typename Again>
  FLASHPLAN_DEVICE bool weigh_step(const AttentionParams& p, const Variant& variant,
                                   const Sm90Context& context, const Visible& visible,
                                   int first_row, int thread, int32_t key, bool is_first,
                                   float (&shrink)[2], Again multiply_again) {
    // This is computed anew each time, because there is no register to keep it in.
    const auto hides = [&] { return hides_keys(p, context, visible, thread, opaque(key)); };
    const Transform<Variant> of(variant, rows_, key + opaque(thread) % 4 * 2);
    if constexpr (!Variant::kUseSoftmax) {
      if (hides()) {
        asm volatile("");  // keeps this a branch instead of selects
        transform<false>(of);
        Base::mask(p, context, visible, first_row, thread, key);
      } else {
        transform<true>(of);
      }
      drop_masked();
      return false;
    }
    shrink[0] = shrink[1] = 1.0F;
    float added[2];
    bool raised = false;
    bool is_weighed = false;
    if (!is_first && !hides()) {
      if constexpr (Variant::kTransformsLogits) raised = follow(of, visible, shrink);
      weigh_transformed(of, added);
      is_weighed = !Base::too_large(added, visible);
      if (!is_weighed) multiply_again();
    }
    if (!is_weighed) {
      transform<false>(of);
      if (hides()) {
        asm volatile("");  // keeps this a branch instead of selects
        Base::mask(p, context, visible, first_row, thread, key);
      }
      float more[2];
      Base::raise(variant.exp2_scale, more);
      Base::weigh(variant.exp2_scale, added);
      shrink[0] *= more[0];
      shrink[1] *= more[1];
      raised = true;
    }
    sum[0] += added[0];
    sum[1] += added[1];
    return raised;
  }

 private:
  /// Whether some rows do not see some of the keys of the step that begins at `key`. Unlike that of
  /// Visible::may_hide(), the result does not depend on how far the producer has come. The shifts,
  /// and so the rounding of o, follow from the result, and must be the same in each run.
  static FLASHPLAN_DEVICE bool hides_keys(const AttentionParams& p, const Sm90Context& context,
                                          const Visible& visible, int thread, int32_t key) {
    if (!visible.may_hide(key)) return false;
    if (visible.cuts(key)) return true;
    const int32_t first = key + opaque(thread) % 4 * 2;
    const uint32_t exist = Base::existing_columns(p, context, first);
    return __any_sync(0xffffffffU, exist != Base::columns_before(S::kTileKv)) != 0;
  }

  /// Applies the variant to this thread's logits in a step. Logit i is in row i / 2 % 2.
  template <typename Variant>
  struct Transform {
    const Variant& variant;
    LogitPosition rows[2];  // positions of this thread's rows at the key of its first column

    FLASHPLAN_DEVICE Transform(const Variant& variant, const LogitPosition (&rows_at_0)[2],
                               int32_t first_key)
        : variant(variant) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[half] = rows_at_0[half];
        // Without opaque(), the compiler would compute what follows from the query alone for all
        // columns before the loop over the steps, and keep it in as many registers.
        rows[half].query = opaque(rows[half].query);
        // If the variant only masks, both rows have the same key value. If it computes logits,
        // opaque() makes each row's key a value of its own, so that the compiler can combine it
        // with the row's query.
        rows[half].key = Variant::kTransformsLogits ? opaque(first_key) : first_key;
      }
    }
    /// `kHasAllKeys`: there are keys in all columns. If not, columns past the last key get the
    /// position of the last key.
    template <bool kHasAllKeys>
    FLASHPLAN_DEVICE float operator()(float x, int i) const {
      LogitPosition at = rows[i / 2 % 2];
      at.key += i / 4 * 8 + i % 2;
      // kv_len may be 0, because a tile of a merge may have no keys.
      if constexpr (!kHasAllKeys) at.key = min(at.key, max(at.kv_len - 1, 0));
      if constexpr (Variant::kTransformsLogits) x = variant.logit(x, at);
      if constexpr (Variant::kMasksLogits) x = variant.visible(at) ? x : -infinity();
      return x;
    }
  };

  template <bool kHasAllKeys, typename Variant>
  FLASHPLAN_DEVICE void transform(const Transform<Variant>& of) {
#pragma unroll
    for (int i = 0; i < S::kTileKv / 2; ++i) {
      logits[i] = of.template operator()<kHasAllKeys>(logits[i], i);
    }
  }

  /// Turns masked logits into weights of 0.
  FLASHPLAN_DEVICE void drop_masked() {
#pragma unroll
    for (float& x : logits) x = x == -infinity() ? 0.0F : x;
  }

  template <typename Variant>
  FLASHPLAN_DEVICE void weigh_transformed(const Transform<Variant>& of, float (&added)[2]) {
    float chains[2][2] = {};
#pragma unroll
    for (int i = 0; i < S::kTileKv / 2; ++i) {
      float& x = logits[i];
      x = of.template operator()<true>(x, i);
      x = exp2_fast(__fmaf_rn(x, of.variant.exp2_scale, -shift[i / 2 % 2]));
      chains[i / 2 % 2][i % 2] += x;
    }
    added[0] = chains[0][0] + chains[0][1];
    added[1] = chains[1][0] + chains[1][1];
  }

  /// Raises the shifts if some logits of the step are much larger than the shifts. It looks at few
  /// columns alone, which represent logits that grow with the key; other large logits are noticed
  /// later, when their weights come out too large. Returns whether shifts were raised.
  template <typename Variant>
  FLASHPLAN_DEVICE bool follow(const Transform<Variant>& of, const Visible& visible,
                               float (&shrink)[2]) {
    // In bits: how much samples may exceed the shifts. Weights may be up to 2^10 (kMost), so half
    // of these bits are left for logits that are larger than the samples.
    constexpr float kSlack = 5.0F;
    // In bits: how far above the samples the shifts are raised, because the next logits are likely
    // to be still larger. 16-bit weights that are smaller by a factor of 2^kAhead keep their
    // precision.
    constexpr float kAhead = S::kWeight == DType::kFloat16 ? 6.0F : 20.0F;
    const float scale = of.variant.exp2_scale;
    float samples[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr int kHalf = S::kTileKv / 16 * 4;
      const int i = S::kTileKv / 2 - 3 + 2 * half;  // the last column
      samples[half] = fmaxf(of.template operator()<true>(logits[i], i),
                            of.template operator()<true>(logits[i - kHalf], i - kHalf));
    }
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_row = visible.most[half] == Base::kMost;
      grows = grows || (is_row && __fmaf_rn(samples[half], scale, -shift[half]) > kSlack);
    }
    if (!__any_sync(0xffffffffU, grows)) return false;
    const float ahead = kAhead / scale;  // logits are in units of softcap where there is one
    samples[0] += ahead;
    samples[1] += ahead;
    Base::raise_to(samples, scale, shrink);
    return true;
  }

  LogitPosition rows_[2];  // positions of this thread's rows at key 0
};

/// Chooses the class that computes the softmax of a kernel.
template <typename S, bool kNeedsPositions>
struct Sm90SoftmaxChoice {
  using Type = Sm90Softmax<S>;
};
template <typename S>
struct Sm90SoftmaxChoice<S, true> {
  using Type = Sm90VariantSoftmax<S>;
};
template <typename S>
using Sm90SoftmaxOf =
    typename Sm90SoftmaxChoice<S, S::Variant::kReadsPositions || !S::Variant::kUseSoftmax>::Type;

}  // namespace flashplan::device
