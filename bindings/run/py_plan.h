// SPDX-License-Identifier: Apache-2.0
// The C++ side of the Python class Plan.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/run/run_args.h"
#include "bindings/run/workspace.h"
#include "bindings/tensors/producer.h"
#include "flashplan/plan.h"

namespace flashplan {

/// Owns a C++ Plan, the plan's workspace, and buffers for copies of the lengths that callers give.
/// Remembers the framework whose current stream plan() uses.
class PyPlan {
 public:
  PyPlan(const AttentionOptions& options, nb::object workspace);

  void plan(nb::handle qo_indptr, nb::handle kv_lens, nb::handle kv_indptr,
            nb::handle shared_prefixes, nb::handle mask_begin, nb::handle stream,
            nb::handle make_key_ranges);

  /// Runs on imported arguments, on the stream of `call`.
  void run(RunArgs& args, const CallStream& call);

  /// Runs on tensors that are views already. Sets the workspace of `tensors` to that of the plan.
  Status run_views(AttentionTensors& tensors, Stream stream);

  const Plan& get() const { return plan_; }
  Device device() const { return plan_.options().device; }

  /// The Plan, for functions that read its schedule. Raises while another thread is planning.
  const Plan& planned() const;

  int traverse(visitproc visit, void* arg) const;
  /// Called when the garbage collector breaks a cycle; the object refuses to run afterwards.
  void clear();

 private:
  class Planning;

  const int32_t* key_ranges_of(const Batch& batch, nb::handle function);
  Producer producer_to_follow(nb::handle stream);

  // Members are destroyed in reverse order. So plan_ is destroyed before stream_of_plan_ and
  // workspace_, which it uses.
  nb::object stream_of_plan_;  // keeps plan()'s stream alive until a plan() on another stream
  Workspace workspace_;
  Plan plan_;
  std::optional<Producer> last_producer_;
  std::vector<int32_t> qo_indptr_, kv_lens_, kv_indptr_, shared_prefixes_, mask_begin_, key_ranges_;
  std::atomic_flag planning_;
};

}  // namespace flashplan
