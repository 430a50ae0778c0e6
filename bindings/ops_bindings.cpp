// SPDX-License-Identifier: Apache-2.0
// merge_states, append_paged_kv and the runtime.
#include <nanobind/stl/string.h>

#include <cstdio>
#include <string>
#include <vector>

#include "bindings.h"
#include "flashplan/flashplan.h"
#include "tensor.h"

namespace flashplan {
namespace {

using namespace nb::literals;

/// State i of a stack [n, ...].
TensorView slice(const TensorView& stack, int64_t i) {
  TensorView view = stack;
  view.rank = stack.rank - 1;
  for (int32_t d = 0; d < view.rank; ++d) {
    view.shape[d] = stack.shape[d + 1];
    view.stride[d] = stack.stride[d + 1];
  }
  if (stack.data != nullptr) {
    view.data = static_cast<char*>(stack.data) + i * stack.stride[0] * item_size(stack.dtype);
  }
  return view;
}

Status merge(const std::vector<AttentionState>& states, nb::handle out, nb::handle lse) {
  const TensorArg out_arg("out", out, TensorKind::kFloat, nullptr, Access::kWrite);
  const TensorArg lse_arg("lse", lse, TensorKind::kFloat, nullptr, Access::kWrite);
  return merge_states(states.data(), static_cast<int32_t>(states.size()),
                      {out_arg.view(), lse_arg.view()});
}

/// Calls the states of a pair by the names of merge_pair's arguments.
Status with_names_of_pair(Status status) {
  static constexpr const char* kNames[][2] = {
      {"o[0]", "o_a"}, {"o[1]", "o_b"}, {"lse[0]", "lse_a"}, {"lse[1]", "lse_b"}};
  const std::string message = status.message;
  for (const auto& [index, name] : kNames) {
    if (message.rfind(index, 0) != 0) continue;
    std::snprintf(status.message, sizeof(status.message), "%s%s", name,
                  message.c_str() + std::char_traits<char>::length(index));
  }
  return status;
}

void merge_pair(nb::handle o_a, nb::handle lse_a, nb::handle o_b, nb::handle lse_b, nb::handle out,
                nb::handle lse) {
  const TensorArg first_o("o_a", o_a, TensorKind::kFloat);
  const TensorArg first_lse("lse_a", lse_a, TensorKind::kFloat);
  const TensorArg second_o("o_b", o_b, TensorKind::kFloat);
  const TensorArg second_lse("lse_b", lse_b, TensorKind::kFloat);
  check(with_names_of_pair(
      merge({{first_o.view(), first_lse.view()}, {second_o.view(), second_lse.view()}}, out, lse)));
}

void merge_stack(nb::handle o, nb::handle lse_in, nb::handle out, nb::handle lse) {
  const TensorArg o_arg("o", o, TensorKind::kFloat);
  const TensorArg lse_arg("lse", lse_in, TensorKind::kFloat);
  const TensorView& o_view = o_arg.view();
  const TensorView& lse_view = lse_arg.view();
  if (o_view.rank != 4 || lse_view.rank != 3) {
    throw nb::value_error(
        ("o: expected o [n, tokens, heads, dim] and lse [n, tokens, heads], got " +
         std::to_string(o_view.rank) + " and " + std::to_string(lse_view.rank) + " dimensions")
            .c_str());
  }
  if (o_view.shape[0] != lse_view.shape[0]) {
    throw nb::value_error(("lse: expected " + std::to_string(o_view.shape[0]) +
                           " states (as o), got " + std::to_string(lse_view.shape[0]))
                              .c_str());
  }
  std::vector<AttentionState> states;
  for (int64_t i = 0; i < o_view.shape[0]; ++i) {
    states.push_back({slice(o_view, i), slice(lse_view, i)});
  }
  check(merge(states, out, lse));
}

void append(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle indptr,
            nb::handle kv_lens, nb::handle block_table, nb::handle page_indptr,
            nb::handle page_indices, bool hnd, nb::handle kv_dtype, nb::handle k_scale,
            nb::handle v_scale) {
  DType stored = DType::kFloat32;
  const bool has_dtype = !kv_dtype.is_none();
  if (has_dtype) stored = nb::cast<DType>(kv_dtype);
  const DType* stored_as = has_dtype ? &stored : nullptr;
  const TensorArg k_arg("k", k, TensorKind::kFloat);
  const TensorArg v_arg("v", v, TensorKind::kFloat);
  const TensorArg k_cache_arg("k_cache", k_cache, TensorKind::kFloat, stored_as, Access::kWrite);
  const TensorArg v_cache_arg("v_cache", v_cache, TensorKind::kFloat, stored_as, Access::kWrite);
  const TensorArg indptr_arg("indptr", indptr, TensorKind::kInt32);
  const TensorArg kv_lens_arg("kv_lens", kv_lens, TensorKind::kInt32);
  const TensorArg block_table_arg("block_table", block_table, TensorKind::kInt32);
  const TensorArg page_indptr_arg("page_indptr", page_indptr, TensorKind::kInt32);
  const TensorArg page_indices_arg("page_indices", page_indices, TensorKind::kInt32);
  AppendTensors tensors;
  tensors.k = k_arg.view();
  tensors.v = v_arg.view();
  tensors.k_cache = k_cache_arg.view();
  tensors.v_cache = v_cache_arg.view();
  tensors.indptr = indptr_arg.view();
  tensors.kv_lens = kv_lens_arg.view();
  tensors.block_table = block_table_arg.view();
  tensors.page_indptr = page_indptr_arg.view();
  tensors.page_indices = page_indices_arg.view();
  tensors.layout = hnd ? KvLayout::kHND : KvLayout::kNHD;
  tensors.k_scale = float_arg("k_scale", k_scale);
  tensors.v_scale = float_arg("v_scale", v_scale);
  Status status;
  {
    const nb::gil_scoped_release released;
    status = append_paged_kv(tensors);
  }
  check(status);
}

}  // namespace

void bind_ops(nb::module_& m) {
  m.def("merge_pair", &merge_pair, "o_a"_a.none(), "lse_a"_a.none(), "o_b"_a.none(),
        "lse_b"_a.none(), "out"_a.none(), "lse"_a.none());
  m.def("merge_stack", &merge_stack, "o"_a.none(), "lse_in"_a.none(), "out"_a.none(),
        "lse"_a.none());
  m.def("append_paged_kv", &append, "k"_a.none(), "v"_a.none(), "k_cache"_a.none(),
        "v_cache"_a.none(), "indptr"_a.none(), "kv_lens"_a.none(), "block_table"_a.none(),
        "page_indptr"_a.none(), "page_indices"_a.none(), "hnd"_a, "kv_dtype"_a.none(),
        "k_scale"_a.none(), "v_scale"_a.none());
  m.def(
      "set_num_threads", [](int num_threads) { check(set_num_threads(num_threads)); },
      "num_threads"_a);
  m.def("get_num_threads", &num_threads);
  m.def("show_config", &show_config);
  m.def("version", &version);
}

}  // namespace flashplan
