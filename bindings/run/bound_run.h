// SPDX-License-Identifier: Apache-2.0
// The Python class BoundRun: a run whose arguments are imported once.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/run/py_plan.h"
#include "bindings/run/run_args.h"

namespace flashplan {

/// Keeps the Plan, the memory of the arguments, and the result alive.
class BoundRun {
 public:
  /// `plan` is a PyPlan. `result` is what calls return. Raises TypeError or ValueError naming the
  /// argument.
  BoundRun(nb::handle plan, const RunObjects& objects, nb::handle result);

  /// Runs the current plan, with all checks of Plan::run().
  nb::object call(nb::handle stream);
  /// A text that describes the current plan.
  nb::str repr() const;

  int traverse(visitproc visit, void* arg) const;
  /// Called when the garbage collector breaks a cycle; calls are refused afterwards.
  void clear();

 private:
  nb::object plan_;
  nb::object memory_;  // a list of objects that keep the memory of the arguments alive
  nb::object result_;
  RunArgs args_;
};

}  // namespace flashplan
