// SPDX-License-Identifier: Apache-2.0
// Reads the shape and the dtype of a DLPack tensor.
#pragma once

#include <string>

#include "bindings/tensors/dlpack.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// The name of a dtype, for messages: "int16", "float64".
std::string name_of(const dlpack::DataType& dtype);

/// Copies shape and strides to `view`. Raises ValueError for a rank outside 1 to kMaxRank,
/// TypeError where there is no shape.
void fill_dims(const char* name, const dlpack::Tensor& tensor, TensorView* view);

/// Fills in the strides of a row-major tensor. Raises ValueError if it is too large to exist.
void set_contiguous_strides(const char* name, TensorView* view);

}  // namespace flashplan
