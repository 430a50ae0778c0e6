// SPDX-License-Identifier: Apache-2.0
// Opens the devices that the engine was built for.
#pragma once

#include <cstdint>
#include <memory>

#include "device.h"
#include "engine/engine.h"
#include "model.h"

namespace engine {

/// The device that the options name.
///   std::invalid_argument  the engine was built without it
///   std::runtime_error     it can not be used
std::unique_ptr<Device> open_device(const Options& options);

/// Random weights of a model on a device.
Model random_model(const ModelConfig& config, uint64_t seed, Device& device);

/// The first GPU. Defined by cuda_device.cpp, or in a build without CUDA by no_cuda.cpp, which
/// refuses. Errors are those of open_device().
std::unique_ptr<Device> open_cuda_device(const Options& options);

}  // namespace engine
