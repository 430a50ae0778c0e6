// SPDX-License-Identifier: Apache-2.0
// From any Python object that has a tensor's memory to a TensorView.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "producer.h"
#include "stream.h"

namespace flashplan {

/// Raises the Python exception that belongs to a failed status.
[[noreturn]] void raise_status(const Status& status);
inline void check(const Status& status) {
  if (!status.ok()) raise_status(status);
}

/// What an argument may hold. kInt: int32 or int64. kBytes: contiguous memory of any numbers, seen
/// as one row of bytes.
enum class TensorKind { kFloat, kInt32, kInt64, kInt, kUInt32, kBytes };
enum class Access { kRead, kWrite };

/// A tensor argument: by DLPack, else by NumPy's __array_interface__ (which ml_dtypes' formats
/// need). The view holds as long as both this and the object live. None gives an empty view. Raises
/// TypeError or ValueError naming the argument.
class TensorArg {
 public:
  /// `stored_as`: the dtype that uint8 or uint16 memory stands for, where the caller knows it.
  TensorArg(const char* name, nb::handle object, TensorKind kind, CallStream& stream,
            const DType* stored_as = nullptr, Access access = Access::kRead);

  const TensorView& view() const noexcept { return view_; }

 private:
  TensorView view_;
  std::optional<DlpackImport> dlpack_;
  nb::object array_interface_;
};

/// A list, tuple or host tensor of integers of rank 1, copied: Python code can change it, and a
/// tensor's memory may be the caller's only while it is imported. `buffer` is reused between calls,
/// so that steps of a known size do not allocate. More than `max_size` entries, of which `limit` is
/// the reason, are refused before they are read. With `columns` > 0 the entries are rows of so many
/// integers: a tensor of rank 2, or a list or tuple of lists or tuples.
struct IntsArg {
  IntsArg(const char* name, nb::handle object, int64_t max_size, const char* limit,
          std::vector<int32_t>& buffer, int32_t columns = 0);
  const int32_t* data = nullptr;
  int32_t size = 0;  // entries
};

/// A Python number, or TypeError or ValueError naming the argument.
float float_arg(const char* name, nb::handle object);

}  // namespace flashplan
