// SPDX-License-Identifier: Apache-2.0
// Binds Variant, and reads the arguments of a variant in a run.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/run/variant_args.h"
#include "bindings/tensors/numbers.h"
#include "common/error.h"
#include "plan/rope_turns.h"
#include "variant/gpu_code.h"
#include "variant/nvrtc.h"
#include "variant/variant_impl.h"

namespace flashplan {
namespace {

using namespace nb::literals;

TensorKind kind_of(DType dtype) {
  switch (dtype) {
    case DType::kInt32: return TensorKind::kInt32;
    case DType::kInt64: return TensorKind::kInt64;
    case DType::kUInt32: return TensorKind::kUInt32;
    case DType::kFloat32: return TensorKind::kFloat32;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kFp8DsMla: break;  // Variant::create() refuses these
  }
  return TensorKind::kFloat;
}

using Bodies = std::vector<std::optional<std::string>>;

/// Makes a Variant. `bodies`: query, key, value, output, logits and mask, in this order.
void make_variant(Variant* self, const std::string& name, const Bodies& bodies, bool softmax,
                  const std::vector<std::tuple<std::string, std::string>>& tensors,
                  const std::vector<std::tuple<std::string, float>>& scalars) {
  const auto text = [&](size_t i) { return bodies.at(i) ? bodies[i]->c_str() : nullptr; };
  std::vector<VariantTensor> c_tensors;
  for (const auto& [tensor, dtype] : tensors) {
    DType type = DType::kFloat16;  // refused by Variant::create(), as all unknown dtypes
    for (const DType known : {DType::kFloat32, DType::kInt32, DType::kInt64, DType::kUInt32}) {
      if (dtype == to_string(known)) type = known;
    }
    c_tensors.push_back({tensor.c_str(), type});
  }
  std::vector<VariantScalar> c_scalars;
  for (const auto& [scalar, value] : scalars) c_scalars.push_back({scalar.c_str(), value});
  Variant variant;
  check(Variant::create({name.c_str(), text(0), text(1), text(2), text(3), text(4), text(5),
                         softmax, c_tensors.data(), static_cast<int32_t>(c_tensors.size()),
                         c_scalars.data(), static_cast<int32_t>(c_scalars.size())},
                        &variant));
  new (self) Variant(std::move(variant));
}

nb::bytes gpu_code(const Variant& variant, const std::string& architecture, DType q_dtype,
                   DType kv_dtype, int head_dim_qk, int head_dim_vo, bool softcap,
                   const std::optional<Rope>& rope, const std::string& family,
                   bool few_rows_alone) {
  const DeviceProgram* program = family == "sm80"   ? &kSm80Program
                                 : family == "sm90" ? &kSm90Program
                                                    : nullptr;
  if (program == nullptr) raise_value("family: expected sm80 or sm90, got " + family);
  const bool has_suffix = !architecture.empty() && architecture.back() > '9';
  RopeTurns turns;
  if (rope) turns = make_rope_turns(*rope, head_dim_qk);
  const GpuKernelTraits traits = {
      .program = *program,
      .architecture = {std::atoi(architecture.c_str()), has_suffix ? architecture.back() : '\0'},
      .q_dtype = q_dtype,
      .kv_dtype = kv_dtype,
      .o_dtype = q_dtype,
      .head_dim_qk = head_dim_qk,
      .head_dim_vo = head_dim_vo,
      .softcap = softcap,
      .few_rows_alone = few_rows_alone,
      .rope = rope ? &turns : nullptr};
  std::string key;
  check(gpu_code_key(*variant.impl(), traits, &key));
  GpuCode code;
  check_compiled(make_gpu_code(*variant.impl(), traits, key, &code), variant);
  return nb::bytes(code.cubin.data(), code.cubin.size());
}

}  // namespace

VariantArgs::VariantArgs(const Variant& variant, nb::handle arguments) : variant_(variant.impl()) {
  if (variant_ == nullptr) return;
  const auto scalars = nb::cast<nb::tuple>(arguments[1]);
  for (size_t i = 0; i < variant_->scalars.size(); ++i) {
    scalars_.push_back(float_arg(variant_->scalars[i].name.c_str(), scalars[i]));
  }
}

void VariantArgs::import(nb::handle arguments, CallStream& call, AttentionTensors* to) {
  if (variant_ == nullptr) return;
  const auto tensors = nb::cast<nb::tuple>(arguments[0]);
  for (size_t i = 0; i < variant_->tensors.size(); ++i) {
    const auto& [name, dtype] = variant_->tensors[i];
    args_.emplace_back(name.c_str(), tensors[i], kind_of(dtype), call);
    views_.push_back(args_.back().view());
  }
  to->variant_tensors = views_.data();
  to->num_variant_tensors = static_cast<int32_t>(views_.size());
  to->variant_scalars = scalars_.data();
  to->num_variant_scalars = static_cast<int32_t>(scalars_.size());
}

void VariantArgs::release_imports_of_arrays(nb::handle arguments) {
  size_t i = 0;
  for (TensorArg& arg : args_) arg.release_import_of_array(arguments[0][i++]);
}

void check_compiled(const Status& status, const Variant& variant) {
  if (std::string_view(status.message).starts_with("variant: expected source")) {
    raise_value(std::string(status.message) + "\n" + variant.compile_log());
  }
  check(status);
}

void bind_variant(nb::module_& m) {
  nb::class_<Variant>(m, "Variant", "Variant of include/flashplan/variant.h.")
      .def("__init__", &make_variant, "name"_a, "bodies"_a, "softmax"_a, "tensors"_a, "scalars"_a)
      .def("compile_log", &Variant::compile_log)
      .def("gpu_code", &gpu_code, "architecture"_a, "q_dtype"_a, "kv_dtype"_a, "head_dim_qk"_a,
           "head_dim_vo"_a, "softcap"_a, "rope"_a = nb::none(), "family"_a = "sm80",
           "few_rows_alone"_a = false,
           "The cubin for an architecture, such as 90 or 90a. Needs no GPU. For tests.");
  m.def("set_nvrtc_path", &set_nvrtc_path, "path"_a);
}

}  // namespace flashplan
