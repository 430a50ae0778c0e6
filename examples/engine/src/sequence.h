// SPDX-License-Identifier: Apache-2.0
// One sample of a request while it is served.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine.h"

namespace engine {

/// What the samples of a request have in common.
struct SharedRequest {
  RequestId id = 0;
  Request request;
  bool prompt_is_cached = false;  // so the other samples may begin and find its pages
};

struct Sequence {
  std::shared_ptr<SharedRequest> shared;
  int32_t sample = 0;
  std::vector<int32_t> tokens;  // the prompt, then what was drawn
  int32_t num_cached = 0;       // while it runs: tokens that have keys and values in the pages
  std::vector<int32_t> pages;

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t num_prompt_tokens() const { return static_cast<int32_t>(shared->request.prompt.size()); }
  int32_t num_new_tokens() const { return num_tokens() - num_prompt_tokens(); }
  int32_t num_uncached() const { return num_tokens() - num_cached; }
};

}  // namespace engine
