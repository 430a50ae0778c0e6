// SPDX-License-Identifier: Apache-2.0
// Binds Plan, BoundRun and find_shared_prefixes().
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/run/bound_run.h"
#include "bindings/run/py_plan.h"
#include "bindings/run/run_args.h"
#include "bindings/tensors/numbers.h"
#include "bindings/tensors/stream.h"
#include "bindings/tensors/tensor.h"
#include "flashplan/plan.h"
#include "flashplan/prefixes.h"

namespace flashplan {
namespace {

using namespace nb::literals;

/// Finds shared prefixes, as tuples (first_request, num_requests, num_tokens).
std::vector<std::tuple<int, int, int>> find_groups(nb::handle qo_indptr, nb::handle kv_lens,
                                                   int page_size, nb::handle block_table,
                                                   nb::handle page_indptr,
                                                   nb::handle page_indices) {
  std::vector<int32_t> qo_buffer, kv_buffer;
  const IntsArg kv("kv_lens", kv_lens, INT32_MAX / 8, "of any batch", kv_buffer);
  const IntsArg qo("qo_indptr", qo_indptr, int64_t{kv.size} + 1, "one more than kv_lens",
                   qo_buffer);
  check_indptr_size("qo_indptr", qo, kv);
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

/// The functions through which the garbage collector calls traverse() and clear() of a class.
template <class T>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<T>(self)->traverse(visit, arg) : 0;
}

template <class T>
int clear(PyObject* self) {
  nb::inst_ptr<T>(self)->clear();
  return 0;
}

template <class T>
PyType_Slot collected_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse<T>)},
                                 {Py_tp_clear, reinterpret_cast<void*>(&clear<T>)},
                                 {0, nullptr}};

/// Refuses to copy or pickle an object, since a copy would point to the memory of the original.
[[noreturn]] void refuse_copy(nb::handle self, nb::args) {
  raise_type(std::string(nb::type_name(self.type()).c_str()) +
             ": expected to stay one object, got a request to copy or pickle it");
}

void run(PyPlan& plan, const TensorTuple& tensors, nb::handle stream, nb::handle pdl,
         nb::handle variant_arguments) {
  RunArgs args(plan.get().options(), {tensors, pdl, variant_arguments}, stream);
  plan.run(args, args.call());
}

/// Plan.bind(). `result`: what each call of the BoundRun returns.
BoundRun* bind(nb::handle_t<PyPlan> plan, const TensorTuple& tensors, nb::handle pdl,
               nb::handle variant_arguments, nb::handle result) {
  return new BoundRun(plan, {tensors, pdl, variant_arguments}, result);
}

/// Plan.check_device_data(). By default it runs on the current stream of the framework that the
/// first given tensor belongs to.
void check_device_data(PyPlan& plan, nb::handle block_table, nb::handle page_indptr,
                       nb::handle page_indices, int64_t num_pages, nb::handle kv_lens,
                       nb::handle slot_mapping, nb::handle stream) {
  Producer producer;
  for (const nb::handle tensor : {block_table, page_indptr, page_indices, kv_lens, slot_mapping}) {
    if (tensor.is_none()) continue;
    producer = producer_of(tensor);
    break;
  }
  CallStream call = call_stream(stream, producer, plan.device());
  const TensorArg table("block_table", block_table, TensorKind::kInt32, call);
  const TensorArg indptr("page_indptr", page_indptr, TensorKind::kInt32, call);
  const TensorArg indices("page_indices", page_indices, TensorKind::kInt32, call);
  const TensorArg lens("kv_lens", kv_lens, TensorKind::kInt32, call);
  const TensorArg slots("slot_mapping", slot_mapping, TensorKind::kInt64, call);
  Status status;
  {
    const GilRelease released;
    status = plan.get().check_device_data(
        {table.view(), indptr.view(), indices.view(), lens.view(), slots.view(), num_pages},
        call.handle);
  }
  check(status);
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

std::string repr(const PyPlan& plan) {
  const ScheduleView schedule = plan.planned().schedule();
  return "<Plan of " + std::to_string(schedule.num_tokens) + " query tokens in " +
         std::to_string(schedule.num_ctas) + " queues of " + plan.planned().kernel_name() +
         "; describe() tells more>";
}

std::string repr_html(const PyPlan& plan) {
  return "<div><pre>" + plan.planned().describe() + "</pre>" + plan.planned().timeline_svg() +
         "</div>";
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<PyPlan>(m, "Plan", nb::type_slots(collected_slots<PyPlan>),
                     "The schedule of the last plan(), and the means to run it.")
      .def(nb::init<const AttentionOptions&, nb::object>(), "options"_a, "workspace"_a = nb::none())
      .def("plan", &PyPlan::plan, "qo_indptr"_a.none(), "kv_lens"_a.none(),
           "kv_indptr"_a.none() = nb::none(), "shared_prefixes"_a.none() = nb::none(),
           "mask_begin"_a.none() = nb::none(), "stream"_a.none() = nb::none(),
           "make_key_ranges"_a.none() = nb::none())
      .def("run", &run, "tensors"_a, "stream"_a.none(), "pdl"_a.none(),
           "variant_arguments"_a.none())
      .def("bind", &bind, "tensors"_a, "pdl"_a.none(), "variant_arguments"_a.none(),
           "result"_a.none())
      .def("check_device_data", &check_device_data, "block_table"_a.none(), "page_indptr"_a.none(),
           "page_indices"_a.none(), "num_pages"_a, "kv_lens"_a.none(), "slot_mapping"_a.none(),
           "stream"_a.none())
      .def(
          "describe", [](const PyPlan& p) { return p.planned().describe(); },
          "The schedule as text: totals, then the first queues.")
      .def("__repr__", &repr)
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
      .def_prop_ro(
          "work_tiles", &work_tiles,
          "Tuples (cta, segment, row_tile, kv_head, num_kv_heads, kv_begin, kv_end, "
          "partial_row), in the order of the queues. Segment r is request r; segments after "
          "the requests are shared prefixes.");

  nb::class_<BoundRun>(m, "BoundRun", nb::type_slots(collected_slots<BoundRun>),
                       "What Attention.bind() returns.")
      .def("__call__", &BoundRun::call, "stream"_a.none() = nb::none())
      .def("__repr__", &BoundRun::repr)
      .def("__reduce_ex__", &refuse_copy);

  m.def("find_shared_prefixes", &find_groups, "qo_indptr"_a, "kv_lens"_a, "page_size"_a,
        "block_table"_a.none(), "page_indptr"_a.none(), "page_indices"_a.none());
}

}  // namespace flashplan
