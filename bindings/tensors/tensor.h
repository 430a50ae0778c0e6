// SPDX-License-Identifier: Apache-2.0
// Makes TensorViews of Python objects that have the memory of a tensor.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "bindings/tensors/producer.h"
#include "bindings/tensors/stream.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// Raises the Python exception that belongs to a failed status.
[[noreturn]] void raise_status(const Status& status);
inline void check(const Status& status) {
  if (!status.ok()) raise_status(status);
}

/// Raises the ValueError for an argument of which PyTorch would record a gradient.
[[noreturn]] void raise_gradient(const char* name);
/// Calls raise_gradient() if `object`, which is used as a number, is a tensor of which PyTorch
/// would record a gradient.
void check_number_without_gradient(const char* name, nb::handle object);

/// The dtypes that an argument accepts.
enum class TensorKind {
  kFloat,    // any float dtype of DType
  kPlanned,  // any float dtype; errors about other dtypes name `stored_as`, the plan's dtype
  kFloat32,
  kInt32,
  kInt64,
  kInt,  // int32 or int64
  kUInt32,
  kScales,  // float32; a tensor of no dimensions counts as one of shape [1]
  kBytes,   // any dtype, contiguous: the view is one row of bytes
};
enum class Access { kRead, kWrite };

/// The dtype of the values in uint16 tensors: frameworks without bfloat16 store it as uint16.
inline constexpr DType kStoredIn16Bits = DType::kBFloat16;

/// A tensor argument. It is imported by DLPack, or by NumPy's __array_interface__ where NumPy does
/// not export the dtype by DLPack (formats of ml_dtypes). The view is valid as long as both this
/// TensorArg and the Python object live. None gives an empty view. Raises TypeError or ValueError
/// naming the argument.
class TensorArg {
 public:
  /// `stored_as`: the dtype of the values if the object has unsigned integers of the same size, 8
  /// or 16 bits. Null: such objects are refused, unless `kind` accepts their dtype.
  TensorArg(const char* name, nb::handle object, TensorKind kind, CallStream& stream,
            const DType* stored_as = nullptr, Access access = Access::kRead);

  const TensorView& view() const noexcept { return view_; }

  /// Releases the import if `object`, which was imported, is a NumPy array in the same memory; the
  /// caller must keep the array alive. The garbage collector does not see what an import holds, so
  /// a reference cycle through it would never be freed.
  void release_import_of_array(nb::handle object);

 private:
  TensorView view_;
  std::optional<DlpackImport> dlpack_;
  nb::object array_interface_;
};

}  // namespace flashplan
