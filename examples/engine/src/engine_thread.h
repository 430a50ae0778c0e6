// SPDX-License-Identifier: Apache-2.0
// Engines of parts that the caller has made.
#pragma once

#include <memory>

#include "backend.h"
#include "checkpoint.h"
#include "engine/engine.h"
#include "model_config.h"

namespace engine {

/// An engine that runs its steps on `backend`, which was made with the same options.
std::unique_ptr<Engine> start_engine(const ModelConfig& config, std::unique_ptr<Backend> backend,
                                     const Options& options);

/// Checks the options, loads the weights, and starts an engine on the CPU.
std::unique_ptr<Engine> start_on_cpu(const ModelConfig& config, WeightSource& source,
                                     const Options& options);

}  // namespace engine
