// SPDX-License-Identifier: Apache-2.0
// NumPy's __array_interface__, for dtypes that NumPy does not export through DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include "flashplan/tensor.h"

namespace flashplan {

namespace nb = nanobind;

/// The memory of an object with __array_interface__, of one of ml_dtypes' formats.
struct ArrayInterface {
  /// Raises TypeError or ValueError naming the argument, also for dtypes that come by DLPack if at
  /// all: then the message says what DLPack had against them.
  ArrayInterface(const char* name, nb::handle object);

  /// False: the object has no __array_interface__.
  bool found() const noexcept { return interface.is_valid(); }

  TensorView view;
  nb::object interface;  // may be what keeps the memory alive
};

}  // namespace flashplan
