// SPDX-License-Identifier: Apache-2.0
// Attention variants: small functors compiled into the kernel (FlashInfer, section 3.2.3).
#pragma once

#include "abi/params.h"
#include "abi/variant.h"
#include "kernels/device/ptx.h"

namespace flashplan::device {

/// softmax(scale * q.k), and the base of every variant. A variant derives from it, and its members
/// hide those of the base. Hooks whose flag is false cost nothing. The key and value hooks also run
/// on masked elements. They must return finite values there, since a weight of 0 does not hide NaN.
struct Standard {
  static constexpr bool kUseSoftmax = true;         // false: weights are the logits themselves
  static constexpr bool kTransformsQuery = false;   // has query(), for each element of q
  static constexpr bool kTransformsKey = false;     // has key(); k_scale is applied after it
  static constexpr bool kTransformsValue = false;   // has value(); v_scale is applied after it
  static constexpr bool kTransformsLogits = false;  // has logit(); masks are applied after it
  static constexpr bool kMasksLogits = false;       // has visible(), which hides further keys
  static constexpr bool kReadsPositions = false;    // logit() or visible() reads its position
  static constexpr bool kTransformsOutput = false;  // has output(), for each element of o
  // false: the kernel is compiled at run time, for one plan. It leaves out what the plan does not
  // need, and has less code for rare cases. It shares no prefixes, and its variant has a constant
  // kOutput, the dtype of o.
  static constexpr bool kIsBuiltIn = true;
  static constexpr bool kHasMaskBits = true;  // false: the plan has no custom_mask
  static constexpr bool kHasChunks = true;    // false: the plan is not batch-invariant
  // Whether queries and keys are rotated after their hooks, with the members that rotation.h lists.
  static constexpr bool kRotates = false;

  explicit FLASHPLAN_DEVICE Standard(const AttentionParams& params)
      : exp2_scale(params.variant.logits_scale * kLog2e) {}

  /// Makes the variant multiply logits by `factor`, too, before any softcap. Kernels call it with
  /// the k_scale of a kv head, before they compute logits with the keys of this head.
  FLASHPLAN_DEVICE void scale_logits(float factor) { exp2_scale *= factor; }
  FLASHPLAN_DEVICE float query(float x, const ElementPosition&) const { return x; }
  FLASHPLAN_DEVICE float key(float x, const ElementPosition&) const { return x; }
  FLASHPLAN_DEVICE float value(float x, const ElementPosition&) const { return x; }
  FLASHPLAN_DEVICE float logit(float product, const LogitPosition&) const { return product; }
  FLASHPLAN_DEVICE bool visible(const LogitPosition&) const { return true; }
  FLASHPLAN_DEVICE float output(float x, const ElementPosition&) const { return x; }

  float exp2_scale;  // weights are exp2(exp2_scale * (logit - max))
};

/// The base of a variant that has a logit() of its own, which returns a logit of base e.
struct OwnLogits : Standard {
  explicit FLASHPLAN_DEVICE OwnLogits(const AttentionParams& params)
      : Standard(params), scale(params.variant.logits_scale) {
    exp2_scale = kLog2e;
  }
  FLASHPLAN_DEVICE void scale_logits(float factor) { scale *= factor; }
  FLASHPLAN_DEVICE float scaled(float product) const { return product * scale; }

  float scale;
};

/// softmax(cap * tanh(scale * q.k / cap)).
struct Softcap : Standard {
  static constexpr bool kTransformsLogits = true;

  explicit FLASHPLAN_DEVICE Softcap(const AttentionParams& params)
      : Standard(params), inner_scale(params.variant.logits_scale / params.variant.softcap) {
    exp2_scale = params.variant.softcap * kLog2e;
  }
  FLASHPLAN_DEVICE void scale_logits(float factor) { inner_scale *= factor; }
  FLASHPLAN_DEVICE float logit(float product, const LogitPosition&) const {
    return tanh_fast(product * inner_scale);
  }

  float inner_scale;
};

}  // namespace flashplan::device
