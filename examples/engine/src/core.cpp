// SPDX-License-Identifier: Apache-2.0
#include "core.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

namespace engine {

namespace {

template <class T>
void expect(bool is_valid, const char* argument, const std::string& expected, const T& got) {
  if (is_valid) return;
  throw std::invalid_argument(std::string(argument) + ": expected " + expected + ", got " +
                              std::to_string(got));
}

void check_tokens(const char* argument, std::span<const int32_t> tokens, int32_t vocab) {
  for (const int32_t token : tokens) {
    expect(token >= 0 && token < vocab, argument, "ids in [0, " + std::to_string(vocab) + ")",
           token);
  }
}

void check_sampling(const Sampling& s) {
  expect(std::isfinite(s.temperature) && s.temperature >= 0, "temperature", "a finite number >= 0",
         s.temperature);
  expect(s.top_k >= 1, "top_k", "at least 1", s.top_k);
  expect(s.top_p > 0 && s.top_p <= 1, "top_p", "a number in (0, 1]", s.top_p);
  expect(s.min_p >= 0 && s.min_p <= 1, "min_p", "a number in [0, 1]", s.min_p);
  expect(std::isfinite(s.repetition) && s.repetition > 0, "repetition", "a finite number > 0",
         s.repetition);
  expect(std::isfinite(s.presence), "presence", "a finite number", s.presence);
  expect(std::isfinite(s.frequency), "frequency", "a finite number", s.frequency);
}

}  // namespace

void check_options(const Options& options) {
  expect(options.page_size >= 1, "page_size", "at least 1", options.page_size);
  expect(options.num_pages >= 1, "num_pages", "at least 1", options.num_pages);
  const int64_t room = int64_t{options.num_pages} * options.page_size;
  expect(room <= INT32_MAX, "num_pages", "at most 2147483647 tokens in all pages", room);
  expect(options.max_batch_size >= 1, "max_batch_size", "at least 1", options.max_batch_size);
  expect(options.max_step_tokens >= options.max_batch_size, "max_step_tokens",
         "at least max_batch_size", options.max_step_tokens);
}

void check_request(const Request& request, const ModelConfig& config, const Options& options) {
  expect(!request.prompt.empty(), "prompt", "at least one token", 0);
  check_tokens("prompt", request.prompt, config.vocab);
  check_tokens("stop_tokens", request.stop_tokens, config.vocab);
  expect(request.max_new_tokens >= 1, "max_new_tokens", "at least 1", request.max_new_tokens);
  constexpr int32_t kMaxSamples = 1024;
  expect(request.num_samples >= 1 && request.num_samples <= kMaxSamples, "num_samples",
         "1 to " + std::to_string(kMaxSamples), request.num_samples);
  const int32_t max_logprobs = std::min(kMaxLogprobs, config.vocab);
  expect(request.num_logprobs >= -1 && request.num_logprobs <= max_logprobs, "num_logprobs",
         "-1 to " + std::to_string(max_logprobs), request.num_logprobs);
  check_sampling(request.sampling);
  expect(request.sampling.seed <= std::numeric_limits<int64_t>::max() - kMaxSamples, "seed",
         "a number that can grow by num_samples", request.sampling.seed);
  // The last token is only drawn: it needs no keys and values, hence no room in the cache.
  const int64_t num_tokens = static_cast<int64_t>(request.prompt.size()) + request.max_new_tokens;
  expect(num_tokens <= config.max_tokens, "max_new_tokens",
         "at most " + std::to_string(config.max_tokens) + " tokens with the prompt", num_tokens);
  const int64_t room = int64_t{options.num_pages} * options.page_size;
  expect(num_tokens - 1 <= room, "max_new_tokens",
         "tokens that fit the cache of " + std::to_string(room), num_tokens);
}

Core::Core(const ModelConfig& config, std::unique_ptr<Backend> backend, const Options& options)
    : config_(config),
      options_(options),
      backend_(std::move(backend)),
      cache_(options.num_pages, options.page_size),
      scheduler_(options, &cache_),
      drawn_(options.max_batch_size) {}

void Core::add(RequestId id, Request request) {
  auto shared = std::make_shared<SharedRequest>();
  shared->id = id;
  shared->request = std::move(request);
  for (int32_t sample = 0; sample < shared->request.num_samples; ++sample) {
    auto sequence = std::make_unique<Sequence>();
    sequence->shared = shared;
    sequence->sample = sample;
    sequence->tokens = shared->request.prompt;
    scheduler_.add(std::move(sequence));
  }
}

void Core::abort(RequestId id, int32_t sample, std::vector<Output>* outputs) {
  forget(id, sample);
  for (const int32_t removed : scheduler_.remove_request(id, sample)) {
    outputs->push_back({id, removed, -1, 0.0F, Finish::kAborted, {}});
  }
}

// --8<-- [start:step]
void Core::step(std::vector<Output>* outputs) {
  // Penalties depend on all earlier tokens, of which a step under way may still draw one.
  const bool needs_tokens = step_.draws.has_penalties || !options_.look_ahead;
  if (needs_tokens && !under_way_.empty()) finish_step(outputs);
  const bool has_started = start_step();
  const std::size_t num_left = has_started && options_.look_ahead ? 1 : 0;
  while (under_way_.size() > num_left) finish_step(outputs);
  is_paused_ |= scheduler_.is_idle();
}
// --8<-- [end:step]

bool Core::start_step() {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  const std::vector<Chunk>& chunks = scheduler_.schedule();
  if (chunks.empty()) return false;
  fill_step(chunks);
  step_.has_paused = is_paused_;
  is_paused_ = false;
  backend_->start(step_);
  scheduler_.complete_step();
  // Gives each draw its place in a sequence, so that the next step can be planned already.
  StepUnderWay& started = under_way_.emplace_back();
  started.num_logprobs = step_.draws.num_logprobs;
  started.is_decode = step_.num_tokens() == step_.batch_size();
  int32_t draw = 0;
  for (const Chunk& chunk : chunks) {
    if (!chunk.has_draw) continue;
    std::vector<int32_t>& tokens = chunk.sequence->tokens;
    started.pending.push_back({chunk.sequence, tokens.size()});
    tokens.push_back(-1 - draw++);
  }
  statistics_.host_seconds += std::chrono::duration<double>(Clock::now() - begin).count();
  return true;
}

void Core::finish_step(std::vector<Output>* outputs) {
  backend_->finish(&drawn_);
  const StepUnderWay finished = std::move(under_way_.front());
  under_way_.pop_front();
  plan_begin(finished.is_decode);
  for (std::size_t i = 0; i < finished.pending.size(); ++i) {
    if (finished.pending[i].sequence == nullptr) continue;
    add_output(finished.pending[i], i, finished.num_logprobs, outputs);
  }
}

void Core::plan_begin(bool was_decode) {
  using Clock = std::chrono::steady_clock;
  // Seconds before the expected end of a step at which the next one begins: planning and the first
  // launches take a part of this time, and the step may be shorter than the last one.
  constexpr double kMargin = 0.7e-3;
  const double busy_seconds = backend_->times().busy;
  if (was_decode) decode_seconds_ = busy_seconds - busy_seconds_;
  busy_seconds_ = busy_seconds;
  next_begin_ = Clock::now();
  if (under_way_.empty() || !under_way_.front().is_decode || decode_seconds_ < kMargin) return;
  const std::chrono::duration<double> rest(decode_seconds_ - kMargin);
  next_begin_ += std::chrono::duration_cast<Clock::duration>(rest);
}

void Core::add_output(const Pending& pending, std::size_t draw, int32_t num_logprobs,
                      std::vector<Output>* outputs) {
  Sequence& sequence = *pending.sequence;
  sequence.tokens[pending.place] = drawn_.tokens[draw];
  const SharedRequest& shared = *sequence.shared;
  const int32_t count = shared.request.num_logprobs;
  const Finish finish = finish_of(sequence, pending.place);
  outputs->push_back({shared.id, sequence.sample, drawn_.tokens[draw],
                      count < 0 ? 0.0F : drawn_.logprobs[draw], finish,
                      drawn_.likeliest(draw, count, num_logprobs)});
  if (finish == Finish::kNot) return;
  forget(shared.id, sequence.sample);
  scheduler_.remove(&sequence);
}

void Core::forget(RequestId request, int32_t sample) {
  for (StepUnderWay& step : under_way_) {
    for (Pending& pending : step.pending) {
      if (pending.sequence == nullptr || pending.sequence->shared->id != request) continue;
      if (sample == kAllSamples || sample == pending.sequence->sample) pending.sequence = nullptr;
    }
  }
}

Statistics Core::statistics() const {
  Statistics result = statistics_;
  result.preemptions = scheduler_.num_preemptions();
  result.reused_tokens = scheduler_.num_reused_tokens();
  result.used_pages = cache_.num_pages() - cache_.num_available();
  result.running = scheduler_.num_running();
  result.waiting = scheduler_.num_waiting();
  result.device_busy_seconds = backend_->times().busy;
  result.device_idle_seconds = backend_->times().idle;
  return result;
}

void Core::fill_step(const std::vector<Chunk>& chunks) {
  Step& s = step_;
  for (auto* values : {&s.tokens, &s.kv_lens, &s.page_indices, &s.last_rows}) values->clear();
  s.qo_indptr.assign(1, 0);
  s.page_indptr.assign(1, 0);
  s.draws.clear();
  bool has_prompt = false, has_decode = false;
  for (const Chunk& chunk : chunks) {
    Sequence& sequence = *chunk.sequence;
    const int32_t kv_len = sequence.num_cached + chunk.num_tokens;
    const auto begin = sequence.tokens.begin() + sequence.num_cached;
    s.tokens.insert(s.tokens.end(), begin, begin + chunk.num_tokens);
    s.qo_indptr.push_back(s.num_tokens());
    s.kv_lens.push_back(kv_len);
    const auto pages = sequence.pages.begin();
    s.page_indices.insert(s.page_indices.end(), pages, pages + cache_.pages_for(kv_len));
    s.page_indptr.push_back(static_cast<int32_t>(s.page_indices.size()));
    const bool is_prompt = sequence.num_cached < sequence.num_prompt_tokens();
    (is_prompt ? has_prompt : has_decode) = true;
    if (!chunk.has_draw) continue;
    s.last_rows.push_back(s.num_tokens() - 1);
    s.draws.add(sequence);
  }
  ++statistics_.steps;
  statistics_.mixed_steps += has_prompt && has_decode;
  statistics_.computed_tokens += s.num_tokens();
}

Finish Core::finish_of(const Sequence& sequence, std::size_t place) const {
  const Request& request = sequence.shared->request;
  const int32_t token = sequence.tokens[place];
  const auto is_in = [=](const std::vector<int32_t>& tokens) {
    return std::ranges::find(tokens, token) != tokens.end();
  };
  const bool is_stop =
      is_in(request.stop_tokens) || (!request.ignore_model_stops && is_in(config_.stop_tokens));
  if (is_stop) return Finish::kStop;
  const std::size_t num_tokens =
      request.prompt.size() + static_cast<std::size_t>(request.max_new_tokens);
  return place + 1 == num_tokens ? Finish::kLength : Finish::kNot;
}

}  // namespace engine
