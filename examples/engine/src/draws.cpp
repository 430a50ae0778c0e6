// SPDX-License-Identifier: Apache-2.0
#include "draws.h"

#include <algorithm>
#include <stdexcept>

namespace engine {

namespace fp = flashplan;

namespace {

fp::TensorView floats(const std::vector<float>& values) {
  return fp::contiguous(values.data(), fp::DType::kFloat32, fp::Device{},
                        {static_cast<int64_t>(values.size())});
}

fp::TensorView int32s(const std::vector<int32_t>& values) {
  return fp::contiguous(values.data(), fp::DType::kInt32, fp::Device{},
                        {static_cast<int64_t>(values.size())});
}

fp::TensorView int64s(const std::vector<int64_t>& values) {
  return fp::contiguous(values.data(), fp::DType::kInt64, fp::Device{},
                        {static_cast<int64_t>(values.size())});
}

void penalize(const fp::TensorView& logits, const History& history,
              const fp::PenaltyOptions& penalties) {
  const fp::TensorView tokens =
      fp::contiguous(history.tokens.data(), fp::DType::kInt32, fp::Device{},
                     {static_cast<int64_t>(history.lens.size()), history.max_len});
  check(fp::apply_penalties(logits, tokens, int32s(history.lens), penalties));
}

}  // namespace

void check(const fp::Status& status) {
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
  // The random numbers depend on the request and the position alone, so that neither its neighbours
  // nor a preemption change a sample.
  seeds.push_back(sampling.seed + sequence.sample);
  offsets.push_back(sequence.num_tokens());
  repetitions.push_back(sampling.repetition);
  presences.push_back(sampling.presence);
  frequencies.push_back(sampling.frequency);
  has_penalties |=
      sampling.repetition != 1.0F || sampling.presence != 0.0F || sampling.frequency != 0.0F;
  num_logprobs = std::max(num_logprobs, sequence.shared->request.num_logprobs);
  sequences.push_back(&sequence);
}

History Draws::history(bool with_prompt) const {
  const auto begin = [=](const Sequence& s) { return with_prompt ? 0 : s.num_prompt_tokens(); };
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

std::vector<TokenLogprob> Drawn::likeliest(const Draws& draws, std::size_t draw) const {
  const int32_t count = draws.sequences[draw]->shared->request.num_logprobs;
  const std::size_t begin = draw * static_cast<std::size_t>(draws.num_logprobs);
  std::vector<TokenLogprob> result;
  for (std::size_t i = begin; count > 0 && i < begin + static_cast<std::size_t>(count); ++i) {
    result.push_back({likeliest_tokens[i], likeliest_logprobs[i]});
  }
  return result;
}

void draw(const Draws& draws, float* logits, int32_t vocab, Drawn* drawn) {
  const auto count = static_cast<int64_t>(draws.size());
  const fp::TensorView rows =
      fp::contiguous(logits, fp::DType::kFloat32, fp::Device{}, {count, vocab});
  if (draws.has_penalties) {
    fp::PenaltyOptions of_all, of_new;
    of_all.repetitions = floats(draws.repetitions);
    of_new.presences = floats(draws.presences);
    of_new.frequencies = floats(draws.frequencies);
    penalize(rows, draws.history(true), of_all);
    penalize(rows, draws.history(false), of_new);
  }
  fp::SampleOptions options;
  options.temperatures = floats(draws.temperatures);
  options.top_ks = int32s(draws.top_ks);
  options.top_ps = floats(draws.top_ps);
  options.min_ps = floats(draws.min_ps);
  options.seeds = int64s(draws.seeds);
  options.offsets = int64s(draws.offsets);
  fp::SampleOutputs outputs;
  outputs.ids = fp::contiguous(drawn->tokens.data(), fp::DType::kInt32, fp::Device{}, {count});
  outputs.logprobs_of = fp::LogprobsOf::kRaw;
  if (draws.num_logprobs >= 0) {
    outputs.logprobs =
        fp::contiguous(drawn->logprobs.data(), fp::DType::kFloat32, fp::Device{}, {count});
  }
  if (draws.num_logprobs > 0) {
    outputs.top_ids = fp::contiguous(drawn->likeliest_tokens.data(), fp::DType::kInt32,
                                     fp::Device{}, {count, draws.num_logprobs});
    outputs.top_logprobs = fp::contiguous(drawn->likeliest_logprobs.data(), fp::DType::kFloat32,
                                          fp::Device{}, {count, draws.num_logprobs});
  }
  check(fp::sample(rows, options, outputs));
}

}  // namespace engine
