// SPDX-License-Identifier: Apache-2.0
// Binds merge_states(), append_paged_kv(), rope_append_paged_kv(), functions of the runtime, and
// helpers of the Python layer.
#include <nanobind/stl/string.h>

#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "api/kernels.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/operator_call.h"
#include "bindings/tensors/numbers.h"
#include "bindings/tensors/scale_arg.h"
#include "bindings/tensors/stream.h"
#include "bindings/tensors/tensor.h"
#include "checks/memory_checks.h"
#include "cuda/device.h"
#include "flashplan/flashplan.h"

namespace flashplan {
namespace {

using namespace nb::literals;

/// The view of state i of a tensor [n, ...].
TensorView slice(const TensorView& stack, int64_t i) {
  TensorView view = stack;
  view.rank = stack.rank - 1;
  for (int32_t d = 0; d < view.rank; ++d) {
    view.shape[d] = stack.shape[d + 1];
    view.stride[d] = stack.stride[d + 1];
  }
  if (has_elements(stack)) {  // the strides of an empty tensor may be anything
    view.data = static_cast<char*>(stack.data) + i * stack.stride[0] * item_size(stack.dtype);
  }
  return view;
}

/// An attention state (o, lse) that is merged.
struct StateArg {
  StateArg(const char* o_name, nb::handle o_object, const char* lse_name, nb::handle lse_object,
           CallStream& call)
      : o(o_name, o_object, TensorKind::kFloat, call, &kStoredIn16Bits),
        lse(lse_name, lse_object, TensorKind::kFloat, call) {}
  AttentionState view() const { return {o.view(), lse.view()}; }

  TensorArg o;
  TensorArg lse;
};

Status merge(const std::vector<AttentionState>& states, nb::handle out, nb::handle lse, bool base2,
             CallStream& call) {
  const TensorArg out_arg("out", out, TensorKind::kFloat, call, &kStoredIn16Bits, Access::kWrite);
  const TensorArg lse_arg("lse", lse, TensorKind::kFloat32, call, nullptr, Access::kWrite);
  Status status;
  {
    const GilRelease released;
    status = merge_states(states.data(), static_cast<int32_t>(states.size()),
                          {out_arg.view(), lse_arg.view()}, call.handle, base2);
  }
  if (status.ok()) call.finish();
  return status;
}

/// The name of an argument in messages of the C++ merge_states(), and its name in Python.
struct Renamed {
  std::string_view from, to;
};

/// Replaces names of arguments in the message of `status`, where a word begins with them.
Status with_names(Status status, std::initializer_list<Renamed> names) {
  std::string message = status.message;
  for (const auto& [from, to] : names) {
    for (size_t at = 0; (at = message.find(from, at)) != std::string::npos; at += to.size()) {
      if (at == 0 || message[at - 1] == ' ') message.replace(at, from.size(), to);
    }
  }
  std::snprintf(status.message, sizeof(status.message), "%s", message.c_str());
  return status;
}

void merge_pair(nb::handle o_a, nb::handle lse_a, nb::handle o_b, nb::handle lse_b, nb::handle out,
                nb::handle lse, bool base2, nb::handle stream) {
  CallStream call = stream_beside("o_a", o_a, stream);
  const StateArg a("o_a", o_a, "lse_a", lse_a, call);
  const StateArg b("o_b", o_b, "lse_b", lse_b, call);
  check(with_names(merge({a.view(), b.view()}, out, lse, base2, call),
                   {{"o[0]", "o_a"}, {"o[1]", "o_b"}, {"lse[0]", "lse_a"}, {"lse[1]", "lse_b"}}));
}

void merge_stack(nb::handle o_a, nb::handle lse_a, nb::handle out, nb::handle lse, bool base2,
                 nb::handle stream) {
  CallStream call = stream_beside("o_a", o_a, stream);
  const StateArg stack("o_a", o_a, "lse_a", lse_a, call);
  const TensorView& o_view = stack.o.view();
  const TensorView& lse_view = stack.lse.view();
  if (o_view.rank != 4 || lse_view.rank != 3) {
    raise_value("o_a: expected o_a [n, tokens, heads, dim] and lse_a [n, tokens, heads], got " +
                std::to_string(o_view.rank) + " and " + std::to_string(lse_view.rank) +
                " dimensions");
  }
  if (o_view.shape[0] != lse_view.shape[0]) {
    raise_value("lse_a: expected " + std::to_string(o_view.shape[0]) + " states (as o_a), got " +
                std::to_string(lse_view.shape[0]));
  }
  // Each state gets a view here. States without elements need no memory of the caller, so without
  // this limit an empty tensor could ask for any number of views.
  constexpr int64_t kMaxStates = 1 << 20;
  if (o_view.shape[0] > kMaxStates) {
    raise_value("o_a: expected at most " + std::to_string(kMaxStates) + " states, got " +
                std::to_string(o_view.shape[0]));
  }
  check(check_memory({"o_a", o_view}));
  check(check_memory({"lse_a", lse_view}));
  std::vector<AttentionState> states;
  for (int64_t i = 0; i < o_view.shape[0]; ++i) {
    states.push_back({slice(o_view, i), slice(lse_view, i)});
  }
  check(with_names(merge(states, out, lse, base2, call),
                   {{"o:", "o_a:"}, {"o[", "o_a["}, {"lse[", "lse_a["}}));
}

/// The layout of the cache and the scales of append_paged_kv(). Make it before any tensor is
/// imported: converting a number may run Python code, which could change an imported tensor.
struct AppendOptions {
  AppendOptions(bool hnd, nb::handle k_scale_object, nb::handle v_scale_object)
      : layout(hnd ? KvLayout::kHND : KvLayout::kNHD),
        k_scale("k_scale", k_scale_object),
        v_scale("v_scale", v_scale_object) {}

  KvLayout layout;
  ScaleArg k_scale, v_scale;
};

/// Imports the tensors that append_paged_kv() and rope_append_paged_kv() both take, and keeps them
/// imported for its lifetime.
class AppendArgs {
 public:
  AppendArgs(const AppendOptions& options, nb::handle k, nb::handle v, nb::handle k_cache,
             nb::handle v_cache, nb::handle indptr, nb::handle kv_lens, nb::handle block_table,
             nb::handle page_indptr, nb::handle page_indices, nb::handle slot_mapping,
             nb::handle batch_indices, nb::handle positions, nb::handle kv_dtype,
             OperatorCall& call)
      : stored_(kv_dtype.is_none() ? kStoredIn16Bits : nb::cast<DType>(kv_dtype)),
        k_(call.input("k", k)),
        v_(call.input("v", v)),
        k_cache_(call.output("k_cache", k_cache, stored_)),
        v_cache_(call.output("v_cache", v_cache, stored_)),
        indptr_(call.optional_input("indptr", indptr, TensorKind::kInt32)),
        kv_lens_(call.optional_input("kv_lens", kv_lens, TensorKind::kInt32)),
        block_table_(call.optional_input("block_table", block_table, TensorKind::kInt32)),
        page_indptr_(call.optional_input("page_indptr", page_indptr, TensorKind::kInt32)),
        page_indices_(call.optional_input("page_indices", page_indices, TensorKind::kInt32)),
        slot_mapping_(call.optional_input("slot_mapping", slot_mapping, TensorKind::kInt64)),
        batch_indices_(call.optional_input("batch_indices", batch_indices, TensorKind::kInt32)),
        positions_(call.optional_input("positions", positions, TensorKind::kInt32)),
        k_scales_(options.k_scale.tensor(call.stream())),
        v_scales_(options.v_scale.tensor(call.stream())) {
    if (!kv_dtype.is_none()) check_stored("kv_dtype", stored_, "k_cache", k_cache_);
    tensors_.k = k_.view();
    tensors_.v = v_.view();
    tensors_.k_cache = k_cache_.view();
    tensors_.v_cache = v_cache_.view();
    tensors_.indptr = indptr_.view();
    tensors_.kv_lens = kv_lens_.view();
    tensors_.block_table = block_table_.view();
    tensors_.page_indptr = page_indptr_.view();
    tensors_.page_indices = page_indices_.view();
    tensors_.slot_mapping = slot_mapping_.view();
    tensors_.batch_indices = batch_indices_.view();
    tensors_.positions = positions_.view();
    tensors_.layout = options.layout;
    tensors_.k_scale = options.k_scale.number();
    tensors_.v_scale = options.v_scale.number();
    tensors_.k_scales = k_scales_.view();
    tensors_.v_scales = v_scales_.view();
  }

  const AppendTensors& tensors() const { return tensors_; }

 private:
  DType stored_;
  TensorArg k_, v_, k_cache_, v_cache_, indptr_, kv_lens_;
  TensorArg block_table_, page_indptr_, page_indices_, slot_mapping_, batch_indices_, positions_;
  TensorArg k_scales_, v_scales_;
  AppendTensors tensors_;
};

void append(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle indptr,
            nb::handle kv_lens, nb::handle block_table, nb::handle page_indptr,
            nb::handle page_indices, nb::handle slot_mapping, nb::handle batch_indices,
            nb::handle positions, bool hnd, nb::handle kv_dtype, nb::handle k_scale,
            nb::handle v_scale, nb::handle stream) {
  const AppendOptions options(hnd, k_scale, v_scale);
  OperatorCall call("k_cache", k_cache, stream);
  const AppendArgs args(options, k, v, k_cache, v_cache, indptr, kv_lens, block_table, page_indptr,
                        page_indices, slot_mapping, batch_indices, positions, kv_dtype, call);
  call.run([&](Stream on) { return append_paged_kv(args.tensors(), on); });
}

void rope_append(nb::handle q, nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache,
                 nb::handle indptr, nb::handle kv_lens, const Rope& rope, nb::handle block_table,
                 nb::handle page_indptr, nb::handle page_indices, bool hnd, nb::handle kv_dtype,
                 nb::handle k_scale, nb::handle v_scale, nb::handle out_q, nb::handle stream) {
  const Rope copy = rope;  // Python code may change it while the call is under way
  const AppendOptions options(hnd, k_scale, v_scale);
  OperatorCall call("k_cache", k_cache, stream);
  const TensorArg q_arg = call.input("q", q);
  const AppendArgs args(options, k, v, k_cache, v_cache, indptr, kv_lens, block_table, page_indptr,
                        page_indices, nb::none(), nb::none(), nb::none(), kv_dtype, call);
  const TensorArg out_q_arg = call.output("out_q", out_q);
  call.run([&](Stream on) {
    return rope_append_paged_kv(q_arg.view(), args.tensors(), copy, out_q_arg.view(), on);
  });
}

}  // namespace

void bind_ops(nb::module_& m) {
  m.def("merge_pair", &merge_pair, "o_a"_a.none(), "lse_a"_a.none(), "o_b"_a.none(),
        "lse_b"_a.none(), "out"_a.none(), "lse"_a.none(), "base2"_a, "stream"_a.none());
  m.def("merge_stack", &merge_stack, "o_a"_a.none(), "lse_a"_a.none(), "out"_a.none(),
        "lse"_a.none(), "base2"_a, "stream"_a.none());
  m.def("append_paged_kv", &append, "k"_a.none(), "v"_a.none(), "k_cache"_a.none(),
        "v_cache"_a.none(), "indptr"_a.none(), "kv_lens"_a.none(), "block_table"_a.none(),
        "page_indptr"_a.none(), "page_indices"_a.none(), "slot_mapping"_a.none(),
        "batch_indices"_a.none(), "positions"_a.none(), "hnd"_a, "kv_dtype"_a.none(),
        "k_scale"_a.none(), "v_scale"_a.none(), "stream"_a.none());
  m.def("rope_append_paged_kv", &rope_append, "q"_a.none(), "k"_a.none(), "v"_a.none(),
        "k_cache"_a.none(), "v_cache"_a.none(), "indptr"_a.none(), "kv_lens"_a.none(), "rope"_a,
        "block_table"_a.none(), "page_indptr"_a.none(), "page_indices"_a.none(), "hnd"_a,
        "kv_dtype"_a.none(), "k_scale"_a.none(), "v_scale"_a.none(), "out_q"_a.none(),
        "stream"_a.none());
  m.def(
      "set_num_threads", [](int num_threads) { check(set_num_threads(num_threads)); },
      "num_threads"_a);
  m.def("get_num_threads", &num_threads);
  m.def("cuda_device_count", &cuda::num_devices);
  m.def(
      "built_for_cuda", [] { return !kernels_for(DeviceType::kCuda).empty(); },
      "Whether kernels for GPUs are compiled in, for any architecture.");
  m.def("show_config", &show_config);
  m.def("version", &version);
  m.def(
      "framework_of",
      [](nb::handle tensor) {
        switch (producer_of(tensor).framework) {
          case Framework::kTorch: return "torch";
          case Framework::kCupy: return "cupy";
          case Framework::kJax: return "jax";
          case Framework::kOther: break;
        }
        return "numpy";
      },
      "tensor"_a.none(), "The name of the framework in which outputs for a tensor are made.");
  m.def(
      "raise_gradient", [](const char* name) { raise_gradient(name); }, "name"_a,
      "Raises the ValueError for an argument that requires a gradient.");
  m.def("check_number_without_gradient", &check_number_without_gradient, "name"_a,
        "number"_a.none(),
        "Raises ValueError if a number is a tensor of which PyTorch would record a gradient.");
}

}  // namespace flashplan
