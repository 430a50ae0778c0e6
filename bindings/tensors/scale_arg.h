// SPDX-License-Identifier: Apache-2.0
// Arguments that are scales, such as k_scale: each is a number, or a tensor that kernels read.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "bindings/tensors/stream.h"
#include "bindings/tensors/tensor.h"

namespace flashplan {

/// An argument that is a scale. Make it before any tensor is imported: the constructor converts a
/// number, which may run Python code that changes an imported tensor.
class ScaleArg {
 public:
  ScaleArg(const char* name, nb::handle scale);

  /// 1 where the scale is a tensor.
  float number() const noexcept { return number_.value_or(1.0F); }
  /// The caller's tensor, or None if the scale is a number.
  nb::handle object() const { return number_ ? nb::handle(nb::none()) : scale_; }
  /// The tensor, imported; empty where the scale is a number.
  TensorArg tensor(CallStream& call) const { return {name_, object(), TensorKind::kScales, call}; }

 private:
  const char* name_;
  nb::handle scale_;
  std::optional<float> number_;
};

}  // namespace flashplan
