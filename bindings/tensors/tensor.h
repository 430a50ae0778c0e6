// SPDX-License-Identifier: Apache-2.0
// From any Python object that has a tensor's memory to a TensorView.
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

/// Raises the ValueError of an argument that PyTorch would record a gradient of.
[[noreturn]] void raise_gradient(const char* name);
/// Raises it for a tensor of PyTorch that is taken as a number, if that is such an argument.
void check_number_without_gradient(const char* name, nb::handle object);

/// The dtypes that an argument accepts.
enum class TensorKind {
  kFloat,    // any float dtype of DType
  kPlanned,  // these too; the refusal of others names the dtype of the plan, given as `stored_as`
  kFloat32,
  kInt32,
  kInt64,
  kInt,  // int32 or int64
  kUInt32,
  kScales,  // float32; a tensor of no dimensions counts as one of shape [1]
  kBytes,   // any dtype, contiguous: the view is one row of bytes
};
enum class Access { kRead, kWrite };

/// What uint16 tensors hold: frameworks without bfloat16 store it in this dtype.
inline constexpr DType kStoredIn16Bits = DType::kBFloat16;

/// A tensor argument. It is imported by DLPack, or by NumPy's __array_interface__ where NumPy does
/// not export the dtype by DLPack (formats of ml_dtypes). The view is valid as long as both this
/// and the object live. None gives an empty view. Raises TypeError or ValueError naming the
/// argument.
class TensorArg {
 public:
  /// `stored_as`: the dtype of the values where the object's dtype is uint8 or uint16; null: those
  /// are refused.
  TensorArg(const char* name, nb::handle object, TensorKind kind, CallStream& stream,
            const DType* stored_as = nullptr, Access access = Access::kRead);

  const TensorView& view() const noexcept { return view_; }

  /// Lets go of what the import holds, if the memory is that of `object`, which was imported, and
  /// this is a NumPy array. The garbage collector does not see what an import holds, so a cycle
  /// through it would never be freed.
  void release_import_of_array(nb::handle object);

 private:
  TensorView view_;
  std::optional<DlpackImport> dlpack_;
  nb::object array_interface_;
};

}  // namespace flashplan
