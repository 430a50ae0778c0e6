// SPDX-License-Identifier: Apache-2.0
#include "bindings/operator_call.h"

#include <string>

#include "common/error.h"
#include "cuda/device.h"

namespace flashplan {

CallStream stream_beside(const char* name, nb::handle tensor, nb::handle stream) {
  const Producer producer = producer_of(tensor);
  const Device device = device_of(tensor, producer);
  // call_stream() may make a stream on this device, so the device must exist.
  if (stream.is_none() && device.type == DeviceType::kCuda &&
      (device.index < 0 || device.index >= cuda::num_devices())) {
    raise_type(std::string(name) + ": expected a tensor on the cpu or one of " +
               std::to_string(cuda::num_devices()) +
               " CUDA devices, got one on cuda:" + std::to_string(device.index));
  }
  return call_stream(stream, producer, device);
}

nb::handle OperatorCall::given(const char* name, nb::handle tensor) {
  if (tensor.is_none()) raise_type(std::string(name) + ": expected a tensor, got None");
  return tensor;
}

void check_stored(const char* name, DType stored, const char* of, const TensorArg& tensor) {
  const DType actual = tensor.view().dtype;
  if (stored == actual) return;
  raise_type(std::string(name) + ": expected " + to_string(actual) + ", the dtype of " + of +
             ", got " + to_string(stored));
}

}  // namespace flashplan
