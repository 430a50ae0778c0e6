// SPDX-License-Identifier: Apache-2.0
// The parameters of a step's draws, and their results.
#pragma once

#include <flashplan/flashplan.h>

#include <cstdint>
#include <vector>

#include "sequence.h"

namespace engine {

/// Tokens that have occurred, a row for each draw, as flashplan::apply_penalties() wants them.
struct History {
  std::vector<int32_t> tokens;  // [draws, max_len]
  std::vector<int32_t> lens;    // [draws]
  int32_t max_len = 0;
};

/// The parameters of draws, in host memory. Each vector has an entry for each draw.
struct Draws {
  std::vector<float> temperatures, top_ps, min_ps;
  std::vector<int32_t> top_ks;
  std::vector<int64_t> seeds, offsets;
  std::vector<float> repetitions, presences, frequencies;
  std::vector<const Sequence*> sequences;
  bool has_penalties = false;
  int32_t num_logprobs = -1;  // the largest Request::num_logprobs

  std::size_t size() const { return sequences.size(); }
  void clear();
  void add(const Sequence& sequence);
  /// Adds draws of the likeliest token that belong to no sequence.
  void add_likeliest(int32_t count);
  /// The tokens of the sequence of each draw: with those of the prompt, or only those after it.
  History history(bool with_prompt) const;
};

/// What was drawn. Draws::num_logprobs determines which log-probabilities there are.
struct Drawn {
  explicit Drawn(int32_t max_draws = 0);

  /// The `count` likeliest tokens of draw number `draw`. `num_logprobs`: how many were written for
  /// each draw (Draws::num_logprobs).
  std::vector<TokenLogprob> likeliest(std::size_t draw, int32_t count, int32_t num_logprobs) const;

  std::vector<int32_t> tokens;  // [draws]
  std::vector<float> logprobs;
  std::vector<int32_t> likeliest_tokens;  // [draws, Draws::num_logprobs]
  std::vector<float> likeliest_logprobs;
};

/// Throws std::runtime_error with the text of a status that is not ok.
void check(const flashplan::Status& status);

}  // namespace engine
