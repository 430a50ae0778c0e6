// SPDX-License-Identifier: Apache-2.0
// From any Python object that has a tensor's memory to a TensorView.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

namespace nb = nanobind;

/// Raises the Python exception that belongs to a failed status.
[[noreturn]] void raise_status(const Status& status);
inline void check(const Status& status) {
  if (!status.ok()) raise_status(status);
}

/// What an argument may hold.
enum class TensorKind { kFloat, kInt32 };
enum class Access { kRead, kWrite };

/// A DLPack tensor that this side owns until it is released.
struct ManagedMemory {
  ManagedMemory() = default;
  ~ManagedMemory();
  ManagedMemory(const ManagedMemory&) = delete;
  ManagedMemory& operator=(const ManagedMemory&) = delete;

  void* tensor = nullptr;  // dlpack::ManagedTensor or dlpack::ManagedTensorVersioned
  bool versioned = false;
};

/// A tensor argument for the duration of a call. In order of preference: DLPack's C exchange API
/// (no Python call, no synchronisation), __dlpack__, NumPy's __array_interface__ (which ml_dtypes'
/// formats need). None gives an empty view. Raises TypeError or ValueError naming the argument.
class TensorArg {
 public:
  /// `stored_as`: the dtype that uint8 or uint16 memory stands for, where the caller knows it.
  TensorArg(const char* name, nb::handle object, TensorKind kind, const DType* stored_as = nullptr,
            Access access = Access::kRead);

  const TensorView& view() const noexcept { return view_; }

 private:
  bool import_dlpack(const char* name, nb::handle object, TensorKind kind, const DType* stored_as);
  bool import_array_interface(const char* name, nb::handle object);

  TensorView view_;
  ManagedMemory managed_;
};

/// Writable host memory of any dtype, as bytes.
struct BytesArg {
  BytesArg(const char* name, nb::handle object);
  void* data = nullptr;
  std::size_t size = 0;
};

/// A list, tuple or host int32 tensor of rank 1 as contiguous memory. `buffer` is reused between
/// calls, so that steps of a known size do not allocate.
struct IntsArg {
  IntsArg(const char* name, nb::handle object, std::vector<int32_t>& buffer);
  const int32_t* data = nullptr;
  int32_t size = 0;
};

/// A Python number, or TypeError naming the argument.
float float_arg(const char* name, nb::handle object);

}  // namespace flashplan
