// SPDX-License-Identifier: Apache-2.0
// The arguments of a run of a Plan, as Python objects and as views.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <optional>

#include "bindings/run/variant_args.h"
#include "bindings/tensors/producer.h"
#include "bindings/tensors/stream.h"
#include "bindings/tensors/tensor.h"
#include "common/run_tensors.h"
#include "flashplan/plan.h"

namespace flashplan {

/// A Python object for each tensor of kRunTensors, in that order; None for those that the caller
/// does not pass.
using TensorTuple = nb::typed<nb::tuple, nb::object, nb::ellipsis>;

/// The arguments of Attention.run() except the stream.
struct RunObjects {
  /// Raises TypeError if `tensors` has another number of items than kRunTensors.
  RunObjects(const TensorTuple& tensors, nb::handle pdl, nb::handle variant_arguments);

  std::array<nb::handle, kNumRunTensors> tensors;
  nb::handle pdl;
  nb::handle variant_arguments;
};

/// Imports the arguments of a run. The views are valid as long as this RunArgs and the Python
/// objects live.
class RunArgs {
 public:
  /// Raises TypeError or ValueError naming the argument.
  RunArgs(const AttentionOptions& options, const RunObjects& objects, nb::handle stream);
  RunArgs(const RunArgs&) = delete;
  RunArgs& operator=(const RunArgs&) = delete;

  /// Releases the imports of NumPy arrays, whose memory the caller keeps alive: the garbage
  /// collector does not see what an import holds, so it would never free a reference cycle through
  /// one. `objects` are those given to the constructor.
  void release_imports_of_arrays(const RunObjects& objects);

  /// The views of all tensors except the workspace.
  AttentionTensors& tensors() noexcept { return tensors_; }
  /// The stream that the tensors were imported on.
  const CallStream& call() const noexcept { return call_; }
  /// The framework of q.
  const Producer& producer() const noexcept { return producer_; }

 private:
  VariantArgs variant_args_;
  Producer producer_;
  CallStream call_;
  std::array<std::optional<TensorArg>, kNumRunTensors> imported_;  // in the order of kRunTensors
  AttentionTensors tensors_;
};

}  // namespace flashplan
