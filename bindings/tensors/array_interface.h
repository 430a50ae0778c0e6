// SPDX-License-Identifier: Apache-2.0
// Imports tensors by NumPy's __array_interface__, for dtypes that NumPy does not export by DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include "flashplan/tensor.h"

namespace flashplan {

namespace nb = nanobind;

/// The memory of an object that has __array_interface__ and a dtype of ml_dtypes.
struct ArrayInterface {
  /// Raises TypeError or ValueError naming the argument. Dtypes that are not of ml_dtypes are
  /// refused, too: they are imported by DLPack.
  ArrayInterface(const char* name, nb::handle object);

  /// False: the object has no __array_interface__.
  bool found() const noexcept { return interface.is_valid(); }

  TensorView view;
  nb::object interface;  // must live as long as `view`: it may own the memory
};

/// A plain numpy.ndarray that views `object`, which may be of a subclass; null if `object` is no
/// NumPy array. Whoever holds the view keeps the memory alive. A DLPack export would do so too, but
/// would hide reference cycles from the garbage collector.
nb::object plain_array(nb::handle object);

}  // namespace flashplan
