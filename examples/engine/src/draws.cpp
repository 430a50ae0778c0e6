// SPDX-License-Identifier: Apache-2.0
#include "draws.h"

#include <algorithm>
#include <stdexcept>

namespace engine {

namespace {

bool has_penalties(const Sampling& s) {
  return s.repetition != 1.0F || s.presence != 0.0F || s.frequency != 0.0F;
}

}  // namespace

void check(const flashplan::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

void Draws::clear() {
  for (auto* values : {&temperatures, &top_ps, &min_ps, &repetitions, &presences, &frequencies}) {
    values->clear();
  }
  top_ks.clear();
  seeds.clear();
  offsets.clear();
  sequences.clear();
  has_penalties = false;
  num_logprobs = -1;
}

void Draws::add(const Sequence& sequence) {
  const Sampling& sampling = sequence.shared->request.sampling;
  temperatures.push_back(sampling.temperature);
  top_ks.push_back(sampling.top_k);
  top_ps.push_back(sampling.top_p);
  min_ps.push_back(sampling.min_p);
  // The random numbers depend on the request's seed, the sample and the position alone, so neither
  // other requests nor a preemption change a sample.
  seeds.push_back(sampling.seed + sequence.sample);
  offsets.push_back(sequence.num_tokens());
  repetitions.push_back(sampling.repetition);
  presences.push_back(sampling.presence);
  frequencies.push_back(sampling.frequency);
  has_penalties |= engine::has_penalties(sampling);
  num_logprobs = std::max(num_logprobs, sequence.shared->request.num_logprobs);
  sequences.push_back(&sequence);
}

void Draws::add_likeliest(int32_t count) {
  const auto size = static_cast<std::size_t>(count);
  for (auto* values : {&temperatures, &min_ps, &presences, &frequencies}) values->assign(size, 0);
  for (auto* values : {&top_ps, &repetitions}) values->assign(size, 1);
  top_ks.assign(size, INT32_MAX);
  seeds.assign(size, 0);
  offsets.assign(size, 0);
  sequences.assign(size, nullptr);
}

History Draws::history(bool with_prompt) const {
  const auto begin = [=](const Sequence& s) {
    if (!engine::has_penalties(s.shared->request.sampling)) return s.num_tokens();
    return with_prompt ? 0 : s.num_prompt_tokens();
  };
  History history;
  history.max_len = 1;  // a tensor without elements has no address
  for (const Sequence* sequence : sequences) {
    history.lens.push_back(sequence->num_tokens() - begin(*sequence));
    history.max_len = std::max(history.max_len, history.lens.back());
  }
  const auto stride = static_cast<std::size_t>(history.max_len);
  history.tokens.resize(size() * stride);
  for (std::size_t i = 0; i < size(); ++i) {
    std::copy(sequences[i]->tokens.begin() + begin(*sequences[i]), sequences[i]->tokens.end(),
              history.tokens.begin() + static_cast<std::ptrdiff_t>(i * stride));
  }
  return history;
}

Drawn::Drawn(int32_t max_draws)
    : tokens(static_cast<std::size_t>(max_draws)),
      logprobs(static_cast<std::size_t>(max_draws)),
      likeliest_tokens(static_cast<std::size_t>(max_draws * kMaxLogprobs)),
      likeliest_logprobs(static_cast<std::size_t>(max_draws * kMaxLogprobs)) {}

std::vector<TokenLogprob> Drawn::likeliest(std::size_t draw, int32_t count,
                                           int32_t num_logprobs) const {
  const std::size_t begin = draw * static_cast<std::size_t>(num_logprobs);
  std::vector<TokenLogprob> result;
  for (std::size_t i = begin; count > 0 && i < begin + static_cast<std::size_t>(count); ++i) {
    result.push_back({likeliest_tokens[i], likeliest_logprobs[i]});
  }
  return result;
}

}  // namespace engine
