// SPDX-License-Identifier: Apache-2.0
// Attention and appending as handlers that XLA calls; python/flashplan/jax.py registers them.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <string>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/run/py_plan.h"
#include "bindings/tensors/tensor.h"
#include "bindings/xla/xla_call.h"
#include "common/error.h"
#include "common/run_tensors.h"
#include "flashplan/kv_cache.h"
#include "flashplan/plan.h"

namespace flashplan {
namespace {

/// Returns the lowest bit, and shifts the others down.
bool next_bit(int64_t* bits) noexcept {
  const bool bit = (*bits & 1) != 0;
  *bits >>= 1;
  return bit;
}

/// Reads optional arguments, so call it after the required ones are read. The attribute "given" has
/// a bit for each of `views`, from the lowest bit up, which is set if the argument was passed.
Status read_given(XlaCall& call, std::initializer_list<TensorView*> views) {
  int64_t given = 0;
  FLASHPLAN_RETURN_IF_ERROR(call.attribute("given", &given));
  for (TensorView* view : views) {
    if (next_bit(&given)) FLASHPLAN_RETURN_IF_ERROR(call.argument(view));
  }
  return {};
}

/// Finds the Attention or AttentionOnDevices with this handle, keeps it alive, and runs its plan
/// for the device of the call. XLA calls this from threads of its own, one for each device, which
/// do not hold the GIL.
Status run_plan(const XlaCall& call, int64_t handle, AttentionTensors& tensors) {
  return surviving_exit([&]() -> Status {
    const nb::gil_scoped_acquire acquired;
    try {
      const nb::object attention =
          nb::module_::import_("flashplan.handles").attr("attention_of")(handle);
      const nb::object plan = attention.attr("_plan_on")(call.device_number());
      return nb::inst_ptr<PyPlan>(plan)->run_views(tensors, call.stream());
    } catch (nb::python_error& raised) {
      const nb::str text(raised.value());
      return error(StatusCode::kNotReady, "%s", text.c_str());
    }
  });
}

/// The handler of run(). Its arguments and results are the tensors of kRunTensors. For each
/// optional tensor the attribute "given" has a bit, which is set if the tensor was passed.
Status run(XlaCall& call) {
  AttentionTensors t;
  int64_t handle = 0, given = 0;
  FLASHPLAN_RETURN_IF_ERROR(call.begin());
  FLASHPLAN_RETURN_IF_ERROR(call.attribute("attention", &handle));
  FLASHPLAN_RETURN_IF_ERROR(call.attribute("given", &given));
  for (const RunTensor& tensor : kRunTensors) {
    TensorView* view = &(t.*tensor.view);
    if (tensor.number != nullptr) {
      FLASHPLAN_RETURN_IF_ERROR(call.attribute(tensor.name, &(t.*tensor.number)));
    }
    if (tensor.is_written()) {
      if (tensor.use == RunTensorUse::kAlways || call.has_results()) {
        FLASHPLAN_RETURN_IF_ERROR(call.result(view));
      }
    } else if (tensor.use == RunTensorUse::kAlways || next_bit(&given)) {
      FLASHPLAN_RETURN_IF_ERROR(call.argument(view));
    }
  }
  return run_plan(call, handle, t);
}

/// The handler of append_paged_kv(). The caches are results that share the memory of the third and
/// fourth argument.
Status append(XlaCall& call) {
  AppendTensors t;
  int64_t is_hnd = 0;
  TensorView old_k_cache, old_v_cache;
  FLASHPLAN_RETURN_IF_ERROR(call.begin());
  FLASHPLAN_RETURN_IF_ERROR(call.attribute("hnd", &is_hnd));
  FLASHPLAN_RETURN_IF_ERROR(call.attribute("k_scale", &t.k_scale));
  FLASHPLAN_RETURN_IF_ERROR(call.attribute("v_scale", &t.v_scale));
  for (TensorView* view : {&t.k, &t.v, &old_k_cache, &old_v_cache, &t.indptr, &t.kv_lens}) {
    FLASHPLAN_RETURN_IF_ERROR(call.argument(view));
  }
  FLASHPLAN_RETURN_IF_ERROR(read_given(
      call, {&t.block_table, &t.page_indptr, &t.page_indices, &t.k_scales, &t.v_scales}));
  FLASHPLAN_RETURN_IF_ERROR(call.result(&t.k_cache));
  FLASHPLAN_RETURN_IF_ERROR(call.result(&t.v_cache));
  if (t.k_cache.data != old_k_cache.data || t.v_cache.data != old_v_cache.data) {
    return error(StatusCode::kInvalidArgument,
                 "k_cache: expected a result in the memory of the argument, got another");
  }
  t.layout = is_hnd != 0 ? KvLayout::kHND : KvLayout::kNHD;
  return append_paged_kv(t, call.stream());
}

template <DeviceType device, Status (*function)(XlaCall&)>
xla::Error* handle(xla::Call* call) noexcept {
  if (told_metadata(*call)) return nullptr;
  XlaCall reader(*call, device);
  Status status;
  try {
    status = function(reader);
  } catch (const std::exception& e) {
    status = error(StatusCode::kNotReady, "call: expected no exception, got %s", e.what());
  }
  return to_xla_error(status, *call->api);
}

nb::capsule capsule_of(xla::Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace

void bind_xla(nb::module_& m) {
  m.def(
      "xla_handlers",
      [](bool on_cuda) {
        constexpr DeviceType kCpu = DeviceType::kCpu, kCuda = DeviceType::kCuda;
        nb::dict handlers;
        handlers["flashplan_run"] = capsule_of(on_cuda ? &handle<kCuda, run> : &handle<kCpu, run>);
        handlers["flashplan_append_paged_kv"] =
            capsule_of(on_cuda ? &handle<kCuda, append> : &handle<kCpu, append>);
        return handlers;
      },
      nb::arg("on_cuda"), nb::sig("def xla_handlers(on_cuda: bool) -> dict[str, object]"),
      "Handlers of XLA's foreign function interface, by the names that XLA calls them by.");
}

}  // namespace flashplan
