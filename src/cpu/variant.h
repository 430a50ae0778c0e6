// SPDX-License-Identifier: Apache-2.0
// The hooks of an attention variant on the CPU; for a GPU see kernels/device/variant.h.
// Only run_queue.h includes this file, inside the namespace of an instruction set.

/// Attention without a variant: softmax(logits). It is the base of every variant, which replaces
/// members by members of the same name. Hooks whose flag is false cost nothing. The key and value
/// hooks also run on masked elements.
struct Standard {
  static constexpr bool kUseSoftmax = true;         // false: weights are the logits themselves
  static constexpr bool kTransformsQuery = false;   // query() changes elements of q
  static constexpr bool kTransformsKey = false;     // key() changes elements, before k_scale
  static constexpr bool kTransformsValue = false;   // value() changes elements, before v_scale
  static constexpr bool kTransformsLogits = false;  // logit() changes logits, before masks
  static constexpr bool kMasksLogits = false;       // visible() hides keys, as does the causal mask
  static constexpr bool kTransformsOutput = false;  // output() changes elements of the normalised o

  explicit Standard(const AttentionParams& /*params*/) {}
};

/// The base of variants in plans with a softcap. It needs no code for that, because on the CPU
/// softmax_row() applies the softcap.
using Softcap = Standard;

/// The base of a variant that has a logit() of its own.
struct OwnLogits : Standard {
  using Standard::Standard;
  /// Returns q.k times all scales of logits. That is `product` itself, because on the CPU queries
  /// are scaled as they are read.
  FLASHPLAN_INLINE float scaled(float product) const { return product; }
};
