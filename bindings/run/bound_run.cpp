// SPDX-License-Identifier: Apache-2.0
#include "bindings/run/bound_run.h"

#include <stdexcept>
#include <utility>

namespace flashplan {
namespace {

/// An object that keeps the memory of an argument alive: the argument itself, or for torch, whose
/// tensors can get other memory (x.data = y), another tensor in the same memory.
nb::object keeper_of(nb::handle argument) {
  const bool is_torch = producer_of(argument).framework == Framework::kTorch;
  return is_torch ? nb::object(argument.attr("detach")()) : nb::borrow(argument);
}

/// Objects that keep the memory of a variant's tensors alive. The arguments of a variant are None,
/// or a pair of tuples: tensors and numbers.
nb::object keepers_of(nb::handle variant_arguments) {
  nb::list keepers;
  if (variant_arguments.is_none()) return keepers;
  for (nb::handle tensor : nb::borrow<nb::tuple>(variant_arguments[0]))
    keepers.append(keeper_of(tensor));
  return keepers;
}

}  // namespace

BoundRun::BoundRun(nb::handle plan, const RunObjects& o, nb::handle result)
    : plan_(nb::borrow(plan)),
      result_(nb::borrow(result)),
      args_(nb::inst_ptr<PyPlan>(plan)->get().options(), o, nb::none()) {
  nb::list memory;
  for (const nb::handle tensor : o.tensors) memory.append(keeper_of(tensor));
  memory.append(keepers_of(o.variant_arguments));
  memory_ = std::move(memory);
  args_.release_imports_of_arrays(o);
  // The import made its stream wait for the producers of tensors. Calls may be on other streams,
  // which do not wait, so the host waits here until the import's stream has finished.
  CallStream imported = args_.call();
  imported.must_finish = imported.waits_for_producer;
  imported.finish();
}

nb::object BoundRun::call(nb::handle stream) {
  if (!plan_.is_valid()) {
    throw std::runtime_error("call: expected a plan, got an object that is being deleted");
  }
  PyPlan& plan = *nb::inst_ptr<PyPlan>(plan_);
  plan.run(args_, call_stream(stream, args_.producer(), plan.device()));
  return result_;
}

nb::str BoundRun::repr() const {
  const nb::str plan = plan_.is_valid() ? nb::repr(plan_) : nb::str("no plan");
  return nb::str("<BoundRun of {}>").format(plan);
}

int BoundRun::traverse(visitproc visit, void* arg) const {
  Py_VISIT(plan_.ptr());
  Py_VISIT(memory_.ptr());
  Py_VISIT(result_.ptr());
  return 0;
}

void BoundRun::clear() {
  plan_.reset();
  memory_.reset();
  result_.reset();
}

}  // namespace flashplan
