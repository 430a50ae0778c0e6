// SPDX-License-Identifier: Apache-2.0
// Binds DType, KernelGroup and Options, and the functions of options that need no Plan.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/tensors/tensor.h"
#include "flashplan/plan.h"

namespace flashplan {

using namespace nb::literals;

void bind_options(nb::module_& m) {
  nb::enum_<DType>(m, "DType", "Element types.")
      .value("float32", DType::kFloat32)
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16)
      .value("float8_e4m3fn", DType::kFloat8E4M3)
      .value("float8_e5m2", DType::kFloat8E5M2)
      .value("fp8_ds_mla", DType::kFp8DsMla);

  nb::enum_<KernelGroup>(m, "KernelGroup", "Which kernels may run the batches of a plan.")
      .value("all", KernelGroup::kAll)
      .value("general", KernelGroup::kGeneral)
      .value("hopper", KernelGroup::kHopper);

  nb::class_<AttentionOptions>(m, "Options", "AttentionOptions of include/flashplan/plan.h.")
      .def(nb::init<>())
      .def_rw("num_qo_heads", &AttentionOptions::num_qo_heads)
      .def_rw("num_kv_heads", &AttentionOptions::num_kv_heads)
      .def_rw("head_dim_qk", &AttentionOptions::head_dim_qk)
      .def_rw("head_dim_vo", &AttentionOptions::head_dim_vo)
      .def_rw("page_size", &AttentionOptions::page_size)
      .def_rw("q_dtype", &AttentionOptions::q_dtype)
      .def_rw("kv_dtype", &AttentionOptions::kv_dtype)
      .def_rw("o_dtype", &AttentionOptions::o_dtype)
      .def_rw("causal", &AttentionOptions::causal)
      .def_rw("window_left", &AttentionOptions::window_left)
      .def_rw("custom_mask", &AttentionOptions::custom_mask)
      .def_rw("shared_kv", &AttentionOptions::shared_kv)
      .def_rw("topk", &AttentionOptions::topk)
      .def_rw("softmax_scale", &AttentionOptions::softmax_scale)
      .def_rw("softcap", &AttentionOptions::softcap)
      .def_rw("rope", &AttentionOptions::rope, nb::arg().none())
      .def_rw("variant", &AttentionOptions::variant)
      .def_rw("max_batch_size", &AttentionOptions::max_batch_size)
      .def_rw("max_qo_tokens", &AttentionOptions::max_qo_tokens)
      .def_rw("num_ctas", &AttentionOptions::num_ctas)
      .def_rw("batch_invariant", &AttentionOptions::batch_invariant)
      .def_rw("lse_base2", &AttentionOptions::lse_base2)
      .def_rw("kernels", &AttentionOptions::kernels)
      .def_prop_rw(
          "hnd", [](const AttentionOptions& o) { return o.kv_layout == KvLayout::kHND; },
          [](AttentionOptions& o, bool hnd) {
            o.kv_layout = hnd ? KvLayout::kHND : KvLayout::kNHD;
          })
      .def_prop_rw(
          "cuda_device",
          [](const AttentionOptions& o) -> std::optional<int> {
            if (o.device.type == DeviceType::kCpu) return std::nullopt;
            return o.device.index;
          },
          [](AttentionOptions& o, std::optional<int> index) {
            o.device = index ? Device{DeviceType::kCuda, *index} : Device{};
          },
          nb::arg().none());

  m.def(
      "is_supported",
      [](const AttentionOptions& options) {
        const Status status = is_supported(options);
        // Engines ask with the head dim of a model, so a head dim that no kernel serves gets an
        // answer and no exception.
        const bool is_too_wide = std::max(options.head_dim_qk, options.head_dim_vo) > kMaxHeadDim;
        if (status.code != StatusCode::kUnsupported && !is_too_wide) check(status);
        return std::make_tuple(status.ok(), std::string(status.message));
      },
      "options"_a);
  m.def(
      "workspace_bytes",
      [](const AttentionOptions& options) {
        std::size_t bytes = 0;
        check(workspace_bytes(options, &bytes));
        return bytes;
      },
      "options"_a);
}

}  // namespace flashplan
