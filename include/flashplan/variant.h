// SPDX-License-Identifier: Apache-2.0
// Variant: a user-defined attention. The user gives the lines in which it differs as C++; they are
// compiled when a Plan is created, and the result is kept on disk.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "flashplan/export.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// A tensor that the bodies read as `name[i]`: a pointer to contiguous elements of kFloat32,
/// kInt32, kInt64 or kUInt32, on the Plan's device. The bodies do not know its size.
struct VariantTensor {
  const char* name = nullptr;
  DType dtype = DType::kFloat32;
};

/// A float32 that the bodies read by name, and its value for runs that give none.
struct VariantScalar {
  const char* name = nullptr;
  float value = 0.0F;
};

/// Bodies are C++ statements without # that return a value. Where a body is null, this part of
/// attention does not change. Each body is called with a float `x`, except for `mask`, and with
/// the int32 positions that are named here:
///
///   query, key,     x: one element. Positions: request, token, head, dim. Returns the element.
///   value           `head` is a query head of q, or a kv head of k and v. x is the stored number,
///                   before k_scale and v_scale. GPU kernels that compute in 16 bits round the
///                   result.
///   logits          x = softmax_scale * k_scale * q.k. Positions: request, query, key, qo_head,
///                   kv_head, qo_len, kv_len. Returns the logit; -inf gives its key the weight 0.
///                   Not together with a softcap.
///   mask            Positions as for `logits`. Returns whether the query sees the key. causal,
///                   window_left and the mask of bits hide keys too. Hidden keys are still
///                   read, unless Batch::key_ranges excludes them.
///   output          x: one element of o, scaled. Positions: request, token, head, dim. Returns the
///                   element.
///
/// `query`, `key` and `token` are positions in the sequence of the request: query i is at kv_len -
/// qo_len + i, with the real kv_len. The bodies query, key, value and logits may also be called for
/// masked elements, so they must return for any number that is stored there.
///
/// Bodies may call exp, exp2, log, log2, tanh, sqrt, rsqrt, pow, sin, cos, erf, floor, ceil, abs,
/// min, max and infinity() on every device.
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
  // Up to 8 of each. Names are identifiers that do not begin with "flashplan". They differ from the
  // parameters of bodies, from the functions above, and from the arguments of a run.
  const VariantTensor* tensors = nullptr;
  int32_t num_tensors = 0;
  const VariantScalar* scalars = nullptr;
  int32_t num_scalars = 0;
};

/// A checked description. It is immutable; copies share it, and may be used from any thread.
class FLASHPLAN_API Variant {
 public:
  /// An empty Variant: attention does not change.
  Variant() noexcept;
  ~Variant();
  Variant(const Variant&) noexcept;
  Variant& operator=(const Variant&) noexcept;

  /// Copies the description. Compiles nothing yet: Plan::create() does.
  ///   kInvalidArgument, kInvalidType  a name or a dtype is not allowed, or nothing would change
  static Status create(const VariantDescription& description, Variant* variant) noexcept;

  bool empty() const noexcept { return impl_ == nullptr; }
  const char* name() const noexcept;  // "" if empty

  /// The compiler's output of the last Plan::create() at which this variant did not compile; the
  /// Status has only the first error. Empty if memory runs out.
  std::string compile_log() const noexcept;

  struct Impl;  // the library's own; see src/variant/variant_impl.h
  const Impl* impl() const noexcept { return impl_.get(); }

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace flashplan
