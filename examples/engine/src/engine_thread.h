// SPDX-License-Identifier: Apache-2.0
// Makes engines from a backend or a model that the caller has made.
#pragma once

#include <memory>

#include "backend.h"
#include "device.h"
#include "engine/engine.h"
#include "model.h"
#include "model_config.h"

namespace engine {

/// An engine that runs its steps on `backend`, which was made with the same options.
std::unique_ptr<Engine> start_engine(const ModelConfig& config, std::unique_ptr<Backend> backend,
                                     const Options& options);

/// An engine that runs a model, which lies in the memory of `device`.
std::unique_ptr<Engine> start_model(Model model, std::unique_ptr<Device> device,
                                    const Options& options);

}  // namespace engine
