// SPDX-License-Identifier: Apache-2.0
// Takes the place of cuda_device.cpp in an engine that is built without the CUDA toolkit.
#include <stdexcept>

#include "open_device.h"

namespace engine {

std::unique_ptr<Device> open_cuda_device(const Options& /*options*/) {
  throw std::invalid_argument("device: expected kCpu (built without the CUDA toolkit), got kCuda");
}

}  // namespace engine
