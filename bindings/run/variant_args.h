// SPDX-License-Identifier: Apache-2.0
// What a Plan with a variant needs of its bindings: the tensors and scalars of a run, and errors of
// the compiler.
#pragma once

#include <nanobind/nanobind.h>

#include <list>
#include <vector>

#include "bindings/tensors/stream.h"
#include "bindings/tensors/tensor.h"
#include "flashplan/plan.h"
#include "flashplan/variant.h"

namespace flashplan {

/// The arguments of run() that a variant adds. `arguments` is a pair of tuples: the tensors, and
/// the scalars, both in the order in which the variant lists them. It is None if the plan has no
/// variant.
class VariantArgs {
 public:
  /// Converts the scalars. Make it before any tensor is imported: converting a number may run
  /// Python code, which could change an imported tensor.
  VariantArgs(const Variant& variant, nb::handle arguments);

  /// Imports the tensors, and sets the variant's fields of `to`, which are valid as long as this
  /// VariantArgs lives.
  void import(nb::handle arguments, CallStream& call, AttentionTensors* to);
  /// Releases the imports of NumPy arrays, whose memory the caller keeps alive: the garbage
  /// collector does not see what an import holds, so it would never free a reference cycle through
  /// one.
  void release_imports_of_arrays(nb::handle arguments);

 private:
  const Variant::Impl* variant_;
  std::vector<float> scalars_;
  std::list<TensorArg> args_;  // a list, because a TensorArg must not move
  std::vector<TensorView> views_;
};

/// Raises the exception of a failed status, with the compiler's log if a variant did not compile.
void check_compiled(const Status& status, const Variant& variant);

}  // namespace flashplan
