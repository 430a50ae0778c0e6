// SPDX-License-Identifier: Apache-2.0
#include "open_device.h"

#include "checkpoint.h"
#include "cpu_device.h"
#include "random_weights.h"

namespace engine {

std::unique_ptr<Device> open_device(const Options& options) {
  if (options.device == DeviceType::kCuda) return open_cuda_device(options);
  return std::make_unique<CpuDevice>(options);
}

Model random_model(const ModelConfig& config, uint64_t seed, Device& device) {
  if (device.place().type == flashplan::DeviceType::kCpu) {
    return load_model(config, *random_weights(seed), device);
  }
  RepeatedRandomWeights loader(seed, device);
  return load_model(config, loader);
}

}  // namespace engine
