// SPDX-License-Identifier: Apache-2.0
#include "bindings/tensors/scale_arg.h"

#include "bindings/tensors/numbers.h"
#include "bindings/tensors/producer.h"

namespace flashplan {
namespace {

/// Whether the host reads the scale, because it is a Python number or a tensor of rank 0 in host
/// memory. Any other scale is a tensor that the kernels read from memory of its device.
bool is_number(nb::handle scale) {
  if (PyFloat_Check(scale.ptr()) != 0 || PyLong_Check(scale.ptr()) != 0) return true;
  const Producer producer = producer_of(scale);
  if (producer.traced) return false;
  if (producer.exchange == nullptr && attribute(scale, "__dlpack__").is_none()) return true;
  const nb::object ndim = attribute(scale, "ndim");
  return PyLong_Check(ndim.ptr()) != 0 && PyLong_AsLong(ndim.ptr()) == 0 &&
         device_of(scale, producer).type == DeviceType::kCpu;
}

}  // namespace

ScaleArg::ScaleArg(const char* name, nb::handle scale) : name_(name), scale_(scale) {
  if (is_number(scale)) number_ = float_arg(name, scale);
}

}  // namespace flashplan
