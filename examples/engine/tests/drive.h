// SPDX-License-Identifier: Apache-2.0
// Runs requests through a Core, and makes random ones.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "core.h"
#include "tiny_model.h"

namespace engine {

using Random = std::mt19937;

inline int32_t pick(Random& random, int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(random);
}

/// A prompt that begins with a part of one of two fixed texts, so that prompts share prefixes.
inline std::vector<int32_t> random_prompt(Random& random, int32_t max_len) {
  const int32_t text = pick(random, 0, 1);
  const int32_t num_shared = pick(random, 0, max_len - 1);
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < num_shared; ++i) prompt.push_back((7 * i * i + 31 * text + i) % 97);
  const int32_t num_own = pick(random, 1, max_len - num_shared);
  for (int32_t i = 0; i < num_own; ++i) prompt.push_back(pick(random, 0, 96));
  return prompt;
}

/// A request, and before which step it comes.
struct Arrival {
  Request request;
  int32_t step = 0;
};

/// (request, sample) -> the prompt and what follows it.
using Texts = std::map<std::pair<RequestId, int32_t>, std::vector<int32_t>>;

/// Serves all requests, and returns their texts. Requests are numbered from 0 in the order of
/// `arrivals`. `before_step` is called with the number of each step. Checks that all pages are
/// available in the end.
inline Texts serve(
    Core& core, const std::vector<Arrival>& arrivals,
    const std::function<void(int32_t)>& before_step = [](int32_t) {}) {
  Texts texts;
  std::size_t num_arrived = 0;
  std::vector<Output> outputs;
  for (int32_t step = 0; num_arrived < arrivals.size() || !core.is_idle(); ++step) {
    while (num_arrived < arrivals.size() && arrivals[num_arrived].step <= step) {
      const Request& request = arrivals[num_arrived].request;
      const auto id = static_cast<RequestId>(num_arrived++);
      for (int32_t i = 0; i < request.num_samples; ++i) texts[{id, i}] = request.prompt;
      core.add(id, request);
    }
    before_step(step);
    core.step(&outputs);
  }
  for (const Output& output : outputs) {
    texts[{output.request, output.sample}].push_back(output.token);
  }
  CHECK_EQ(core.cache().num_available(), core.cache().num_pages());
  return texts;
}

inline std::unique_ptr<Core> tiny_core(const std::string& type, const Options& options) {
  check_options(options);
  return std::make_unique<Core>(tiny_config(type), cpu_backend(tiny_model(type), options), options);
}

}  // namespace engine
