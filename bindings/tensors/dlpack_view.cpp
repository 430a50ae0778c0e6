// SPDX-License-Identifier: Apache-2.0
#include "bindings/tensors/dlpack_view.h"

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>

#include "bindings/tensors/producer.h"

namespace flashplan {

std::string name_of(const dlpack::DataType& dtype) {
  static constexpr const char* kNames[] = {"int",    "uint",    "float", "handle",
                                           "bfloat", "complex", "bool"};
  const char* kind = dtype.code < std::size(kNames) ? kNames[dtype.code] : "another kind of float";
  char name[48];
  std::snprintf(name, sizeof(name), "%s%d%s", kind, dtype.bits, dtype.lanes == 1 ? "" : " vectors");
  return name;
}

void fill_dims(const char* name, const dlpack::Tensor& tensor, TensorView* view) {
  if (tensor.ndim > kMaxRank || tensor.ndim < 1) {
    raise_value(std::string(name) + ": expected 1 to " + std::to_string(kMaxRank) +
                " dimensions, got " + std::to_string(tensor.ndim));
  }
  if (tensor.shape == nullptr) {
    raise_type(std::string(name) + ": expected a DLPack tensor with a shape, got a null pointer");
  }
  view->rank = tensor.ndim;
  for (int32_t d = 0; d < tensor.ndim; ++d) {
    view->shape[d] = tensor.shape[d];
    if (tensor.strides != nullptr) view->stride[d] = tensor.strides[d];
  }
  if (tensor.strides == nullptr) set_contiguous_strides(name, view);
}

void set_contiguous_strides(const char* name, TensorView* view) {
  int64_t stride = 1;
  for (int32_t d = view->rank - 1; d >= 0; --d) {
    view->stride[d] = stride;
    if (!__builtin_mul_overflow(stride, view->shape[d], &stride)) continue;
    raise_value(std::string(name) + ": expected elements within the address space, got " +
                std::to_string(view->shape[d]) + " in dim " + std::to_string(d));
  }
}

}  // namespace flashplan
