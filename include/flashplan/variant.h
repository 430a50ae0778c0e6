// SPDX-License-Identifier: Apache-2.0
// Variant: an attention of the user's own. The lines in which it differs are given as C++, compiled
// when a Plan is made, and kept on disk.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// A tensor that the bodies read as `name[i]`: a pointer to contiguous elements of kFloat32,
/// kInt32, kInt64 or kUInt32, on the Plan's device. Its size is not known to the bodies.
struct VariantTensor {
  const char* name = nullptr;
  DType dtype = DType::kFloat32;
};

/// A float32 that the bodies read by name, and its value where a run is given none.
struct VariantScalar {
  const char* name = nullptr;
  float value = 0.0F;
};

/// Bodies are statements of C++ without # that return a value, or null where attention is as
/// always. Each is called with int32 positions and, but for `mask`, a float `x`:
///
///   query, key,     x: one element. request, token, head, dim. Returns the element. q's heads are
///   value           query heads, those of k and v kv heads. x is the stored number, before k_scale
///                   and v_scale; where a GPU kernel computes in 16 bits, the result is rounded so.
///   logits          x = softmax_scale * k_scale * q.k. request, query, key, qo_head, kv_head,
///                   qo_len, kv_len. Returns the logit; -inf gives its key the weight 0. Not
///                   together with a softcap.
///   mask            The positions of logits. Returns whether the query sees the key; causal,
///                   window_left and the mask of bits hold besides.
///   output          x: one element of o, scaled. request, token, head, dim. Returns the element.
///
/// `query`, `key` and `token` are positions in the cache: query i of a request stands at kv_len -
/// qo_len + i, of the real kv_len. What a mask hides may be read nevertheless: query, key, value
/// and logits must not depend on what is stored there to return.
///
/// exp, exp2, log, log2, tanh, sqrt, rsqrt, pow, sin, cos, erf, floor, ceil, abs, min, max and
/// infinity() work on every device.
struct VariantDescription {
  const char* name = nullptr;  // an identifier; errors of the compiler are at "<name>.<body>:line"
  const char* query = nullptr;
  const char* key = nullptr;
  const char* value = nullptr;
  const char* output = nullptr;
  const char* logits = nullptr;
  const char* mask = nullptr;
  /// false: the weights of keys are the logits themselves, and there is no lse.
  bool softmax = true;
  // Up to 8 each. Names are identifiers, different from what bodies are called with, from the
  // functions above and from what a run takes.
  const VariantTensor* tensors = nullptr;
  int32_t num_tensors = 0;
  const VariantScalar* scalars = nullptr;
  int32_t num_scalars = 0;
};

/// A checked description. Immutable: copies refer to the same, from any thread.
class FLASHPLAN_API Variant {
 public:
  /// No variant: attention as always.
  Variant() noexcept;
  ~Variant();
  Variant(const Variant&) noexcept;
  Variant& operator=(const Variant&) noexcept;

  /// Copies the description. Compiles nothing yet: Plan::create() does.
  ///   kInvalidArgument, kInvalidType  a name or a dtype can not be, or nothing differs
  static Status create(const VariantDescription& description, Variant* variant) noexcept;

  bool empty() const noexcept { return impl_ == nullptr; }
  const char* name() const noexcept;  // "" if empty

  /// What the compiler said when a Plan of this variant was last made and did not compile; the
  /// Status has the first error alone. Empty if memory runs out.
  std::string compile_log() const noexcept;

  struct Impl;  // the library's own; see src/variant/variant_impl.h
  const Impl* impl() const noexcept { return impl_.get(); }

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace flashplan
