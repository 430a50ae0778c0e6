// SPDX-License-Identifier: Apache-2.0
// Which requests come, and when.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace serving {

/// How long prompts and outputs are.
///
///   sharegpt              log-normal with the means 230 and 203 of vLLM's 1,000 ShareGPT prompts
///                         (vllm#18566), not the texts themselves
///   azure                 quantiles of Azure's conversations of 2023 (AzurePublicDataset)
///   mooncake              quantiles of Mooncake's conversations, without their prefixes
///   uniform:LOW:HIGH:OUT  prompts of LOW to HIGH tokens, outputs of OUT tokens
struct Workload {
  std::string lengths = "sharegpt";
  int32_t max_tokens = 32768;  // of a prompt and its output; longer prompts are cut
  double rate = 16;            // requests a second
  /// The coefficient of variation of the time between requests. 1: a Poisson process; above 1:
  /// bursts, by a Gamma distribution.
  double variation = 1;
  int32_t num_requests = 320;
  uint64_t seed = 1;
};

struct Arrival {
  double seconds = 0;  // since the begin
  int32_t prompt_tokens = 0;
  int32_t output_tokens = 0;
};

/// Throws std::invalid_argument for an unknown workload.
std::vector<Arrival> make_arrivals(const Workload& workload);

}  // namespace serving
