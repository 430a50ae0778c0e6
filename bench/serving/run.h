// SPDX-License-Identifier: Apache-2.0
// Runs an engine, and measures when its tokens come.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine.h"
#include "workload.h"

namespace serving {

struct Measured {
  std::vector<double> first_token_ms;  // of requests, since they came
  std::vector<double> token_gap_ms;    // between tokens of a sample
  int64_t output_tokens = 0;
  double seconds = 0;
  engine::Statistics statistics;  // of this run alone
};

/// Open loop: requests come when they come, however busy the engine is. The first `num_dropped`
/// requests are not measured. Outputs have the lengths of the arrivals.
Measured run_load(engine::Engine& engine, const std::vector<Arrival>& arrivals, int32_t vocab,
                  int32_t num_samples, int32_t num_dropped);

/// `batch_size` requests of `context` tokens, of which each gets `num_tokens` more. Measured is
/// what comes while all of them decode.
Measured run_decodes(engine::Engine& engine, int32_t vocab, int32_t batch_size, int32_t context,
                     int32_t num_tokens);

}  // namespace serving
