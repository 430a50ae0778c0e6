// SPDX-License-Identifier: Apache-2.0
// One sample of a request while it is served.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine.h"

namespace engine {

/// What the samples of a request have in common.
struct SharedRequest {
  RequestId id = 0;
  Request request;
  bool prompt_is_cached = false;  // then other samples may begin, and find the prompt's pages
};

struct Sequence {
  std::shared_ptr<SharedRequest> shared;
  int32_t sample = 0;
  /// The prompt, then the tokens that were drawn. A token that a step under way draws is not known
  /// yet: the entry is -1 - i if it is draw number i of that step.
  std::vector<int32_t> tokens;
  int32_t num_cached = 0;     // while it runs: tokens that have keys and values in the pages
  int32_t num_published = 0;  // while it runs: tokens whose full pages are published
  std::vector<int32_t> pages;

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t num_prompt_tokens() const { return static_cast<int32_t>(shared->request.prompt.size()); }
  int32_t num_new_tokens() const { return num_tokens() - num_prompt_tokens(); }
  int32_t num_known_tokens() const {
    int32_t count = num_tokens();
    while (tokens[static_cast<std::size_t>(count) - 1] < 0) --count;
    return count;
  }
  /// Whether its last token was drawn, or is being drawn.
  bool is_complete() const { return num_new_tokens() == shared->request.max_new_tokens; }
  /// Tokens that are still to be computed.
  int32_t num_uncached() const { return is_complete() ? 0 : num_tokens() - num_cached; }
};

}  // namespace engine
