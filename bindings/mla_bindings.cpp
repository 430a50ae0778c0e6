// SPDX-License-Identifier: Apache-2.0
// Binds append_mla() and gather_mla().
#include <nanobind/stl/optional.h>

#include <optional>

#include "bindings/bindings.h"
#include "bindings/operator_call.h"
#include "bindings/tensors/numbers.h"
#include "flashplan/mla.h"

namespace flashplan {
namespace {

using namespace nb::literals;

void append(nb::handle kv_c, nb::handle k_pe, nb::handle cache, nb::handle cache_tail,
            nb::handle slot_mapping, DType stored, bool is_given, nb::handle scale,
            nb::handle norm_weight, nb::handle eps, std::optional<Rope> rope, nb::handle positions,
            nb::handle q_pe, nb::handle stream) {
  MlaAppendTensors t;
  t.scale = float_arg("scale", scale);
  t.eps = float_arg("eps", eps);
  OperatorCall call("cache", cache, stream);
  const auto optional_output = [&](const char* name, nb::handle tensor, const DType& as) {
    return TensorArg(name, tensor, TensorKind::kFloat, call.stream(), &as, Access::kWrite);
  };
  const TensorArg kv_c_arg = call.input("kv_c", kv_c);
  const TensorArg k_pe_arg = call.optional_input("k_pe", k_pe);
  const TensorArg cache_arg = call.output("cache", cache, stored);
  const TensorArg tail_arg = optional_output("cache_tail", cache_tail, stored);
  const TensorArg slots = call.input("slot_mapping", slot_mapping, TensorKind::kInt64);
  const TensorArg weight = call.optional_input("norm_weight", norm_weight);
  const TensorArg positions_arg = call.optional_input("positions", positions, TensorKind::kInt);
  const TensorArg q_pe_arg = optional_output("q_pe", q_pe, kStoredIn16Bits);
  if (is_given) check_stored("kv_dtype", stored, "cache", cache_arg);
  t.kv_c = kv_c_arg.view();
  t.k_pe = k_pe_arg.view();
  t.cache = {cache_arg.view(), tail_arg.view()};
  t.slot_mapping = slots.view();
  t.norm_weight = weight.view();
  t.positions = positions_arg.view();
  t.q_pe = q_pe_arg.view();
  call.run([&](Stream on) { return append_mla(t, rope ? &*rope : nullptr, on); });
}

void gather(nb::handle cache, nb::handle cache_tail, DType stored, bool is_given,
            nb::handle block_table, nb::handle kv_indptr, nb::handle starts, nb::handle out,
            nb::handle out_tail, nb::handle scale, nb::handle stream) {
  MlaGatherTensors t;
  t.scale = float_arg("scale", scale);
  OperatorCall call("cache", cache, stream);
  const TensorArg cache_arg("cache", cache, TensorKind::kFloat, call.stream(), &stored);
  const TensorArg tail_arg("cache_tail", cache_tail, TensorKind::kFloat, call.stream(), &stored);
  const TensorArg table = call.input("block_table", block_table, TensorKind::kInt32);
  const TensorArg indptr = call.input("kv_indptr", kv_indptr, TensorKind::kInt32);
  const TensorArg starts_arg = call.optional_input("starts", starts, TensorKind::kInt32);
  const TensorArg out_arg = call.output("out", out);
  const TensorArg out_tail_arg("out_tail", out_tail, TensorKind::kFloat, call.stream(),
                               &kStoredIn16Bits, Access::kWrite);
  if (is_given) check_stored("kv_dtype", stored, "cache", cache_arg);
  t.cache = {cache_arg.view(), tail_arg.view()};
  t.block_table = table.view();
  t.kv_indptr = indptr.view();
  t.starts = starts_arg.view();
  t.out = out_arg.view();
  t.out_tail = out_tail_arg.view();
  call.run([&](Stream on) { return gather_mla(t, on); });
}

}  // namespace

void bind_mla(nb::module_& m) {
  m.def("append_mla", &append, "kv_c"_a.none(), "k_pe"_a.none(), "cache"_a.none(),
        "cache_tail"_a.none(), "slot_mapping"_a.none(), "stored"_a, "is_given"_a, "scale"_a.none(),
        "norm_weight"_a.none(), "eps"_a.none(), "rope"_a.none(), "positions"_a.none(),
        "q_pe"_a.none(), "stream"_a.none());
  m.def("gather_mla", &gather, "cache"_a.none(), "cache_tail"_a.none(), "stored"_a, "is_given"_a,
        "block_table"_a.none(), "kv_indptr"_a.none(), "starts"_a.none(), "out"_a.none(),
        "out_tail"_a.none(), "scale"_a.none(), "stream"_a.none());
}

}  // namespace flashplan
