// SPDX-License-Identifier: Apache-2.0
#include "bindings/run/run_args.h"

#include <cstddef>
#include <string>

#include "bindings/tensors/numbers.h"
#include "bindings/tensors/scale_arg.h"

namespace flashplan {
namespace {

/// The dtypes that run() accepts for one of its tensors. `kind` says which dtypes the values may
/// have. `stored_as` is for frameworks without bfloat16 or without 8-bit floats, which pass such
/// values as tensors of uint16 or uint8 with the same bits. If *stored_as is a dtype of 16 or 8
/// bits, run() also accepts unsigned integers of as many bits, and reads them as values of dtype
/// *stored_as. If `stored_as` is null, or *stored_as has more than 16 bits, it does not.
struct Accepted {
  TensorKind kind;
  const DType* stored_as = nullptr;
};

Accepted accepted_by(const RunTensor& tensor, const AttentionOptions& options) {
  switch (tensor.kind) {
    case RunTensorKind::kQuery: return {TensorKind::kPlanned, &options.q_dtype};
    case RunTensorKind::kCache: return {TensorKind::kPlanned, &options.kv_dtype};
    case RunTensorKind::kOutput: return {TensorKind::kPlanned, &options.o_dtype};
    case RunTensorKind::kFloat: return {TensorKind::kFloat, &kStoredIn16Bits};
    case RunTensorKind::kInt32: return {TensorKind::kInt32};
    case RunTensorKind::kUInt32: return {TensorKind::kUInt32};
    case RunTensorKind::kFloat32: break;
  }
  return {tensor.number != nullptr ? TensorKind::kScales : TensorKind::kFloat32};
}

}  // namespace

RunObjects::RunObjects(const TensorTuple& objects, nb::handle pdl_object, nb::handle arguments)
    : pdl(pdl_object), variant_arguments(arguments) {
  if (objects.size() != tensors.size()) {
    raise_type("tensors: expected " + std::to_string(tensors.size()) + ", got " +
               std::to_string(objects.size()));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i] = objects[i];
}

RunArgs::RunArgs(const AttentionOptions& options, const RunObjects& o, nb::handle stream)
    : variant_args_(options.variant, o.variant_arguments) {
  // Numbers are converted before any tensor is imported: the conversion may run Python code, and
  // that code could change a tensor.
  auto objects = o.tensors;
  for (std::size_t i = 0; i < kNumRunTensors; ++i) {
    if (kRunTensors[i].number == nullptr) continue;
    const ScaleArg scale(kRunTensors[i].name, objects[i]);
    tensors_.*kRunTensors[i].number = scale.number();
    objects[i] = scale.object();
  }
  tensors_.pdl = bool_arg("pdl", o.pdl);
  producer_ = producer_of(objects[0]);
  call_ = call_stream(stream, producer_, options.device);
  for (std::size_t i = 0; i < kNumRunTensors; ++i) {
    const RunTensor& tensor = kRunTensors[i];
    if (objects[i].is_none()) {
      if (!tensor.is_required(options.shared_kv)) continue;
      raise_type(std::string(tensor.name) + ": expected a tensor, got None");
    }
    const auto [kind, stored_as] = accepted_by(tensor, options);
    const Access access = tensor.is_written() ? Access::kWrite : Access::kRead;
    imported_[i].emplace(tensor.name, objects[i], kind, call_, stored_as, access);
    tensors_.*tensor.view = imported_[i]->view();
  }
  variant_args_.import(o.variant_arguments, call_, &tensors_);
}

void RunArgs::release_imports_of_arrays(const RunObjects& o) {
  for (std::size_t i = 0; i < kNumRunTensors; ++i) {
    if (imported_[i]) imported_[i]->release_import_of_array(o.tensors[i]);
  }
  variant_args_.release_imports_of_arrays(o.variant_arguments);
}

}  // namespace flashplan
