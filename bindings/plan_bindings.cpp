// SPDX-License-Identifier: Apache-2.0
// Binds Plan and find_shared_prefixes().
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "api/check_lengths.h"
#include "bindings.h"
#include "flashplan/plan.h"
#include "flashplan/prefixes.h"
#include "gil.h"
#include "numbers.h"
#include "plan_run.h"
#include "stream.h"
#include "tensor.h"
#include "variant/disk_cache.h"
#include "variant_args.h"
#include "workspace.h"

namespace flashplan {
namespace {

using namespace nb::literals;

void check_size(const char* name, const IntsArg& indptr, const IntsArg& lens) {
  if (indptr.size == lens.size + 1) return;
  raise_value(std::string(name) + ": expected " + std::to_string(lens.size + 1) +
              " entries (one more than kv_lens), got " + std::to_string(indptr.size));
}

/// Whether the host reads the scale: a Python number, or a host tensor without dimensions. All
/// other tensors are read by the kernels.
bool is_number(nb::handle scale) {
  if (PyFloat_Check(scale.ptr()) != 0 || PyLong_Check(scale.ptr()) != 0) return true;
  const Producer producer = producer_of(scale);
  if (producer.traced) return false;
  if (producer.exchange == nullptr && attribute(scale, "__dlpack__").is_none()) return true;
  const nb::object ndim = attribute(scale, "ndim");
  return PyLong_Check(ndim.ptr()) != 0 && PyLong_AsLong(ndim.ptr()) == 0 &&
         device_of(scale, producer).type == DeviceType::kCpu;
}

/// The Python class Plan. It owns a C++ Plan, the plan's workspace, and buffers for copies of the
/// lengths that callers give; and it remembers the framework whose current stream plan() uses.
class PyPlan {
 public:
  PyPlan(const AttentionOptions& options, nb::object workspace) {
    AttentionOptions wanted = options;
    if (!workspace.is_none()) {
      workspace_.borrow(std::move(workspace), options.device);
      wanted.workspace_bytes = workspace_.size();
    }
    Status status;
    {
      const GilRelease released;  // a variant takes seconds to compile
      status = Plan::create(wanted, &plan_);
    }
    check_compiled(status, wanted.variant);
    const std::string warning = take_cache_warning();
    if (!warning.empty() && PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 2) != 0) {
      throw nb::python_error();
    }
    if (workspace_.data() == nullptr) workspace_.allocate(plan_.workspace_bytes(), options.device);
  }

  void plan(nb::handle qo_indptr, nb::handle kv_lens, nb::handle kv_indptr,
            nb::handle shared_prefixes, nb::handle mask_begin, nb::handle stream,
            nb::handle make_key_ranges) {
    const Planning planning(planning_);
    const IntsArg kv("kv_lens", kv_lens, plan_.options().max_batch_size, "max_batch_size",
                     kv_lens_);
    const int64_t most = int64_t{kv.size} + 1;
    const IntsArg qo("qo_indptr", qo_indptr, most, "one more than kv_lens", qo_indptr_);
    check_size("qo_indptr", qo, kv);
    Batch batch{qo.data, kv.data, nullptr, kv.size};
    if (!kv_indptr.is_none()) {
      const IntsArg rows("kv_indptr", kv_indptr, most, "one more than kv_lens", kv_indptr_);
      check_size("kv_indptr", rows, kv);
      batch.kv_indptr = rows.data;
    }
    if (!shared_prefixes.is_none()) {
      const IntsArg groups("shared_prefixes", shared_prefixes,
                           2 * int64_t{plan_.options().max_batch_size}, "2 * max_batch_size",
                           shared_prefixes_, 3);
      batch.shared_prefixes = groups.data;
      batch.num_shared_prefixes = groups.size;
    }
    if (!mask_begin.is_none()) {
      const IntsArg begins("mask_begin", mask_begin, most - 1, "as many as kv_lens", mask_begin_);
      if (begins.size != kv.size) {
        raise_value("mask_begin: expected " + std::to_string(kv.size) +
                    " entries (as many as kv_lens), got " + std::to_string(begins.size));
      }
      batch.mask_begin = begins.data;
    }
    if (!make_key_ranges.is_none()) batch.key_ranges = key_ranges_of(batch, make_key_ranges);
    CallStream call = call_stream(stream, producer_to_follow(stream), device());
    Status status;
    {
      const GilRelease released;  // plan() waits if too many copies are under way
      status = plan_.plan(batch, call.handle);
    }
    check(status);
    stream_of_plan_ = std::move(call.owner);
  }

  void run(nb::handle q, nb::handle k, nb::handle v, nb::handle block_table, nb::handle page_indptr,
           nb::handle page_indices, nb::handle kv_lens, nb::handle mask, nb::handle sinks,
           nb::handle out, nb::handle lse, nb::handle k_scale, nb::handle v_scale,
           nb::handle stream, nb::handle variant_arguments) {
    const AttentionOptions& options = plan_.options();
    VariantArgs variant_args(options.variant, variant_arguments);
    AttentionTensors tensors;
    // Scalars are converted before any tensor is imported: the conversion may run Python code, and
    // that code could change a tensor.
    const bool k_scale_is_number = is_number(k_scale);
    const bool v_scale_is_number = is_number(v_scale);
    if (k_scale_is_number) tensors.k_scale = float_arg("k_scale", k_scale);
    if (v_scale_is_number) tensors.v_scale = float_arg("v_scale", v_scale);
    const Producer producer = producer_of(q);
    CallStream call = call_stream(stream, producer, device());
    const TensorArg q_arg("q", required("q", q), TensorKind::kFloat, call, &options.q_dtype);
    const TensorArg k_arg("k", required("k", k), TensorKind::kFloat, call, &options.kv_dtype);
    const TensorArg v_arg("v", required("v", v), TensorKind::kFloat, call, &options.kv_dtype);
    const TensorArg block_table_arg("block_table", block_table, TensorKind::kInt32, call);
    const TensorArg page_indptr_arg("page_indptr", page_indptr, TensorKind::kInt32, call);
    const TensorArg page_indices_arg("page_indices", page_indices, TensorKind::kInt32, call);
    const TensorArg kv_lens_arg("kv_lens", kv_lens, TensorKind::kInt32, call);
    const TensorArg mask_arg("mask", mask, TensorKind::kUInt32, call);
    const TensorArg sinks_arg("sinks", sinks, TensorKind::kFloat, call);
    const TensorArg k_scales_arg("k_scale", k_scale_is_number ? nb::none() : k_scale,
                                 TensorKind::kScales, call);
    const TensorArg v_scales_arg("v_scale", v_scale_is_number ? nb::none() : v_scale,
                                 TensorKind::kScales, call);
    const TensorArg out_arg("out", required("out", out), TensorKind::kFloat, call, &options.o_dtype,
                            Access::kWrite);
    const TensorArg lse_arg("lse", lse, TensorKind::kFloat, call, nullptr, Access::kWrite);
    variant_args.import(variant_arguments, call, &tensors);
    tensors.q = q_arg.view();
    tensors.k = k_arg.view();
    tensors.v = v_arg.view();
    tensors.block_table = block_table_arg.view();
    tensors.page_indptr = page_indptr_arg.view();
    tensors.page_indices = page_indices_arg.view();
    tensors.kv_lens = kv_lens_arg.view();
    tensors.mask = mask_arg.view();
    tensors.sinks = sinks_arg.view();
    tensors.k_scales = k_scales_arg.view();
    tensors.v_scales = v_scales_arg.view();
    tensors.o = out_arg.view();
    tensors.lse = lse_arg.view();
    check(run_views(tensors, call.handle));
    if (call.on_cuda()) {
      last_producer_ = producer;
      call.finish();
    }
  }

  /// Runs on tensors that are views already, in the plan's workspace.
  Status run_views(AttentionTensors& tensors, Stream stream) {
    tensors.workspace = workspace_.data();
    tensors.workspace_bytes = plan_.workspace_bytes();
    const GilRelease released;
    return plan_.run(tensors, stream);
  }

  const Plan& get() const { return plan_; }

  /// For functions that read the schedule: raises while another thread is planning.
  const Plan& planned() const {
    if (planning_.test(std::memory_order_acquire)) raise_busy();
    return plan_;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(workspace_.owner().ptr());
    Py_VISIT(stream_of_plan_.ptr());
    return 0;
  }

  /// Called when the garbage collector breaks a cycle; the object refuses to run afterwards.
  void clear() {
    plan_ = Plan();
    workspace_.release();
    stream_of_plan_.reset();
  }

 private:
  [[noreturn]] static void raise_busy() {
    throw std::runtime_error("plan: expected one thread at a time, got a second one");
  }

  /// Raises in a second thread, before it overwrites the lengths that the first one reads.
  class Planning {
   public:
    explicit Planning(std::atomic_flag& flag) : flag_(flag) {
      if (flag.test_and_set(std::memory_order_acquire)) raise_busy();
    }
    ~Planning() { flag_.clear(std::memory_order_release); }
    Planning(const Planning&) = delete;
    Planning& operator=(const Planning&) = delete;

   private:
    std::atomic_flag& flag_;
  };

  Device device() const { return plan_.options().device; }

  /// Calls the Python function that computes the range of keys of each query, with qo_indptr and
  /// kv_lens as bytes, and returns the ranges. Returns null without a call if plan() is going to
  /// refuse the lengths.
  const int32_t* key_ranges_of(const Batch& batch, nb::handle function) {
    check(check_lengths(batch));
    const int32_t num_tokens = batch.qo_indptr[batch.batch_size];
    if (num_tokens > plan_.options().max_qo_tokens) return nullptr;
    const auto bytes_of = [](const int32_t* numbers, int32_t count) {
      return nb::bytes(reinterpret_cast<const char*>(numbers),
                       static_cast<size_t>(count) * sizeof(int32_t));
    };
    const nb::object ranges = function(bytes_of(batch.qo_indptr, batch.batch_size + 1),
                                       bytes_of(batch.kv_lens, batch.batch_size));
    return IntsArg("key_range", ranges, num_tokens, "one for each query", key_ranges_, 2).data;
  }

  /// The producer of the last run(); before the first run(), imported_producer().
  Producer producer_to_follow(nb::handle stream) {
    if (!stream.is_none() || device().type == DeviceType::kCpu) return {};
    if (!last_producer_) {
      const Producer imported = imported_producer();
      if (imported.framework == Framework::kOther) return imported;
      last_producer_ = imported;
    }
    return *last_producer_;
  }

  static nb::handle required(const char* name, nb::handle object) {
    if (object.is_none()) raise_type(std::string(name) + ": expected a tensor, got None");
    return object;
  }

  // Members are destroyed in reverse order: plan_ must go first, since it uses these two.
  nb::object stream_of_plan_;  // must exist until the next plan() on another stream
  Workspace workspace_;
  Plan plan_;
  std::optional<Producer> last_producer_;
  std::vector<int32_t> qo_indptr_, kv_lens_, kv_indptr_, shared_prefixes_, mask_begin_, key_ranges_;
  std::atomic_flag planning_;
};

/// Finds shared prefixes, as tuples (first_request, num_requests, num_tokens).
std::vector<std::tuple<int, int, int>> find_groups(nb::handle qo_indptr, nb::handle kv_lens,
                                                   int page_size, nb::handle block_table,
                                                   nb::handle page_indptr,
                                                   nb::handle page_indices) {
  std::vector<int32_t> qo_buffer, kv_buffer;
  const IntsArg kv("kv_lens", kv_lens, INT32_MAX / 8, "of any batch", kv_buffer);
  const IntsArg qo("qo_indptr", qo_indptr, int64_t{kv.size} + 1, "one more than kv_lens",
                   qo_buffer);
  check_size("qo_indptr", qo, kv);
  CallStream host;
  const TensorArg table("block_table", block_table, TensorKind::kInt32, host);
  const TensorArg indptr("page_indptr", page_indptr, TensorKind::kInt32, host);
  const TensorArg indices("page_indices", page_indices, TensorKind::kInt32, host);
  Batch batch;
  batch.qo_indptr = qo.data;
  batch.kv_lens = kv.data;
  batch.batch_size = kv.size;
  std::vector<int32_t> rows(3 * static_cast<size_t>(kv.size));
  int32_t count = 0;
  Status status;
  {
    const GilRelease released;
    status = find_shared_prefixes(batch, page_size, {table.view(), indptr.view(), indices.view()},
                                  rows.data(), &count);
  }
  check(status);
  std::vector<std::tuple<int, int, int>> groups;
  groups.reserve(static_cast<size_t>(count));
  for (size_t i = 0; i < 3 * static_cast<size_t>(count); i += 3) {
    groups.emplace_back(rows[i], rows[i + 1], rows[i + 2]);
  }
  return groups;
}

int traverse_plan(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<PyPlan>(self)->traverse(visit, arg) : 0;
}

int clear_plan(PyObject* self) {
  nb::inst_ptr<PyPlan>(self)->clear();
  return 0;
}

PyType_Slot plan_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse_plan)},
                            {Py_tp_clear, reinterpret_cast<void*>(&clear_plan)},
                            {0, nullptr}};

/// Refuses to copy or pickle an object: a copy would share what it points to.
[[noreturn]] void refuse_copy(nb::handle self, nb::args) {
  raise_type(std::string(nb::type_name(self.type()).c_str()) +
             ": expected to stay one object, got a request to copy or pickle it");
}

using WorkTileTuple = std::tuple<int, int, int, int, int, int, int, int>;

std::vector<WorkTileTuple> work_tiles(const PyPlan& plan) {
  const ScheduleView schedule = plan.planned().schedule();
  std::vector<WorkTileTuple> tuples;
  for (int32_t c = 0; c < schedule.num_ctas; ++c) {
    for (int32_t i = schedule.cta_indptr[c]; i < schedule.cta_indptr[c + 1]; ++i) {
      const WorkTile& t = schedule.tiles[i];
      tuples.emplace_back(c, t.segment, t.row_tile, t.kv_head, t.num_kv_heads, t.kv_begin, t.kv_end,
                          t.partial_row);
    }
  }
  return tuples;
}

std::string repr_html(const PyPlan& plan) {
  return "<div><pre>" + plan.planned().describe() + "</pre>" + plan.planned().timeline_svg() +
         "</div>";
}

}  // namespace

Status run_views(nb::handle plan, AttentionTensors& tensors, Stream stream) {
  return nb::inst_ptr<PyPlan>(plan)->run_views(tensors, stream);
}

void bind_plan(nb::module_& m) {
  nb::class_<PyPlan>(m, "Plan", nb::type_slots(plan_slots),
                     "The schedule of the last plan(), and the means to run it.")
      .def(nb::init<const AttentionOptions&, nb::object>(), "options"_a, "workspace"_a = nb::none())
      .def("plan", &PyPlan::plan, "qo_indptr"_a.none(), "kv_lens"_a.none(),
           "kv_indptr"_a.none() = nb::none(), "shared_prefixes"_a.none() = nb::none(),
           "mask_begin"_a.none() = nb::none(), "stream"_a.none() = nb::none(),
           "make_key_ranges"_a.none() = nb::none())
      .def("run", &PyPlan::run, "q"_a.none(), "k"_a.none(), "v"_a.none(), "block_table"_a.none(),
           "page_indptr"_a.none(), "page_indices"_a.none(), "kv_lens"_a.none(), "mask"_a.none(),
           "sinks"_a.none(), "out"_a.none(), "lse"_a.none(), "k_scale"_a.none(), "v_scale"_a.none(),
           "stream"_a.none(), "variant_arguments"_a.none())
      .def(
          "describe", [](const PyPlan& p) { return p.planned().describe(); },
          "The schedule as text: totals, then the first queues.")
      .def("_repr_html_", &repr_html)
      .def("__reduce_ex__", &refuse_copy)
      .def_prop_ro("options", [](const PyPlan& p) { return p.get().options(); })
      .def_prop_ro("workspace_bytes", [](const PyPlan& p) { return p.get().workspace_bytes(); })
      .def_prop_ro("kernel_name", [](const PyPlan& p) { return p.get().kernel_name(); })
      .def_prop_ro("num_tokens", [](const PyPlan& p) { return p.planned().schedule().num_tokens; })
      .def_prop_ro("tile_q", [](const PyPlan& p) { return p.planned().schedule().tile_q; })
      .def_prop_ro("num_ctas", [](const PyPlan& p) { return p.planned().schedule().num_ctas; })
      .def_prop_ro("num_partial_rows",
                   [](const PyPlan& p) { return p.planned().schedule().num_partial_rows; })
      .def_prop_ro(
          "cta_costs",
          [](const PyPlan& p) {
            const ScheduleView schedule = p.planned().schedule();
            return std::vector<int64_t>(schedule.cta_cost, schedule.cta_cost + schedule.num_ctas);
          },
          "Predicted cost of each queue.")
      .def_prop_ro("work_tiles", &work_tiles,
                   "Tuples (cta, request, row_tile, kv_head, num_kv_heads, kv_begin, kv_end, "
                   "partial_row), in the order of the queues.");

  m.def("find_shared_prefixes", &find_groups, "qo_indptr"_a, "kv_lens"_a, "page_size"_a,
        "block_table"_a.none(), "page_indptr"_a.none(), "page_indices"_a.none());
}

}  // namespace flashplan
