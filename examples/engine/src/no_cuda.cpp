// SPDX-License-Identifier: Apache-2.0
// An engine that was built without the CUDA toolkit.
#include <stdexcept>

#include "open_device.h"

namespace engine {

std::unique_ptr<Device> open_cuda_device(const Options& /*options*/) {
  throw std::invalid_argument("device: expected kCpu (built without the CUDA toolkit), got kCuda");
}

}  // namespace engine
