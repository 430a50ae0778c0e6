// SPDX-License-Identifier: Apache-2.0
#include "step_memory.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace engine {

namespace fp = flashplan;

namespace {

constexpr std::size_t kAlignment = 16;

bool has_filters(const Draws& draws) {
  const auto differs = [](auto neutral) { return [=](auto value) { return value != neutral; }; };
  return std::ranges::any_of(draws.top_ks, differs(INT32_MAX)) ||
         std::ranges::any_of(draws.top_ps, differs(1.0F)) ||
         std::ranges::any_of(draws.min_ps, differs(0.0F));
}

}  // namespace

StepMemory::StepMemory(const ModelConfig& config, const Options& options, Device* device)
    : device_(device), max_tokens_(options.max_step_tokens) {
  constexpr std::size_t kWord = 4;
  // Rounded up to a multiple of the alignment, so that the tokens that the host sends follow the
  // drawn tokens without a gap.
  const std::size_t draws = (static_cast<std::size_t>(options.max_batch_size) + 3) / 4 * 4;
  const auto tokens = static_cast<std::size_t>(options.max_step_tokens);
  const int64_t room = int64_t{options.num_pages} * options.page_size;
  const int64_t longest = std::min<int64_t>(config.max_tokens, room);
  max_draws_ = static_cast<int64_t>(draws);
  max_pages_ = options.max_batch_size * ((longest + options.page_size - 1) / options.page_size);
  likeliest_logprobs_ = reserve(draws * kMaxLogprobs, kWord);
  likeliest_tokens_ = reserve(draws * kMaxLogprobs, kWord);
  logprobs_ = reserve(draws, kWord);
  ids_ = reserve(draws, kWord);
  tokens_ = reserve(tokens, kWord);
  sources_ = reserve(tokens, kWord);
  qo_indptr_ = reserve(draws + 1, kWord);
  kv_lens_ = reserve(draws, kWord);
  page_indptr_ = reserve(draws + 1, kWord);
  last_rows_ = reserve(draws, kWord);
  temperatures_ = reserve(draws, kWord);
  top_ks_ = reserve(draws, kWord);
  top_ps_ = reserve(draws, kWord);
  min_ps_ = reserve(draws, kWord);
  seeds_ = reserve(draws, 2 * kWord);
  offsets_ = reserve(draws, 2 * kWord);
  repetitions_ = reserve(draws, kWord);
  presences_ = reserve(draws, kWord);
  frequencies_ = reserve(draws, kWord);
  page_indices_ = reserve(static_cast<std::size_t>(max_pages_), kWord);
  memory_ = device->allocate(num_bytes_);
}

void StepMemory::send(const Step& step, const StepSize& size) {
  const std::size_t num_bytes = page_indices_ + step.page_indices.size() * 4 - tokens_;
  std::byte* const staged = device_->stage(num_bytes_ - tokens_);
  const auto put = [&](std::size_t offset, const auto& values) {
    const std::size_t bytes = values.size() * sizeof(values[0]);
    if (bytes > 0) std::memcpy(staged + (offset - tokens_), values.data(), bytes);
  };
  const auto fill = [&](std::size_t offset, std::size_t begin, int64_t end, int32_t value) {
    auto* values = reinterpret_cast<int32_t*>(staged + (offset - tokens_));
    for (std::size_t i = begin; i < static_cast<std::size_t>(end); ++i) values[i] = value;
  };
  put(tokens_, step.tokens);
  auto* sources = reinterpret_cast<int32_t*>(staged + (sources_ - tokens_));
  for (std::size_t i = 0; i < step.tokens.size(); ++i) {
    const int32_t token = step.tokens[i];
    sources[i] =
        token < 0 ? -1 - token : static_cast<int32_t>(max_draws_) + static_cast<int32_t>(i);
  }
  fill(sources_, step.tokens.size(), size.tokens, 0);
  put(qo_indptr_, step.qo_indptr);
  fill(qo_indptr_, step.qo_indptr.size(), size.batch + 1, step.qo_indptr.back());
  put(kv_lens_, step.kv_lens);
  fill(kv_lens_, step.kv_lens.size(), size.batch, 0);
  put(page_indptr_, step.page_indptr);
  fill(page_indptr_, step.page_indptr.size(), size.batch + 1, step.page_indptr.back());
  put(last_rows_, step.last_rows);
  fill(last_rows_, step.last_rows.size(), size.draws, 0);
  const Draws& d = step.draws;
  put(temperatures_, d.temperatures);
  put(top_ks_, d.top_ks);
  put(top_ps_, d.top_ps);
  put(min_ps_, d.min_ps);
  put(seeds_, d.seeds);
  put(offsets_, d.offsets);
  put(repetitions_, d.repetitions);
  put(presences_, d.presences);
  put(frequencies_, d.frequencies);
  put(page_indices_, step.page_indices);
  device_->send(static_cast<std::byte*>(memory_.get()) + tokens_, num_bytes, step.has_paused);
}

void StepMemory::fetch(int64_t num_draws, int32_t num_logprobs) {
  fetched_[num_fetched_++ % 2] = {num_draws, num_logprobs};
  const std::size_t begin = num_logprobs > 0 ? likeliest_logprobs_ : logprobs_;
  device_->fetch(static_cast<const std::byte*>(memory_.get()) + begin, tokens_ - begin);
}

void StepMemory::wait(Drawn* drawn) {
  const Fetched fetched = fetched_[num_waited_for_++ % 2];
  const std::size_t begin = fetched.num_logprobs > 0 ? likeliest_logprobs_ : logprobs_;
  const std::byte* const copy = device_->wait();
  const auto get = [&](std::size_t offset, int64_t count, auto* values) {
    std::memcpy(values->data(), copy + (offset - begin),
                static_cast<std::size_t>(count) * sizeof((*values)[0]));
  };
  get(ids_, fetched.num_draws, &drawn->tokens);
  if (fetched.num_logprobs >= 0) get(logprobs_, fetched.num_draws, &drawn->logprobs);
  if (fetched.num_logprobs > 0) {
    const int64_t count = fetched.num_draws * fetched.num_logprobs;
    get(likeliest_tokens_, count, &drawn->likeliest_tokens);
    get(likeliest_logprobs_, count, &drawn->likeliest_logprobs);
  }
  for (int64_t i = 0; i < fetched.num_draws; ++i) {
    if (drawn->tokens[static_cast<std::size_t>(i)] >= 0) continue;
    throw std::runtime_error("logits: expected numbers, got NaN");
  }
}

fp::TensorView StepMemory::pool() const {
  fp::TensorView pool = view(ids_, fp::DType::kInt32, max_draws_ + max_tokens_);
  pool.rank = 2;
  pool.shape[1] = pool.stride[0] = pool.stride[1] = 1;
  return pool;
}

fp::TensorView StepMemory::sources(const StepSize& size) const {
  return view(sources_, fp::DType::kInt32, size.tokens);
}

fp::TensorView StepMemory::qo_indptr(const StepSize& size) const {
  return view(qo_indptr_, fp::DType::kInt32, size.batch + 1);
}

fp::TensorView StepMemory::kv_lens(const StepSize& size) const {
  return view(kv_lens_, fp::DType::kInt32, size.batch);
}

fp::TensorView StepMemory::page_indptr(const StepSize& size) const {
  return view(page_indptr_, fp::DType::kInt32, size.batch + 1);
}

fp::TensorView StepMemory::page_indices() const {
  return view(page_indices_, fp::DType::kInt32, max_pages_);
}

fp::TensorView StepMemory::last_rows(const StepSize& size) const {
  return view(last_rows_, fp::DType::kInt32, size.draws);
}

fp::SampleOptions StepMemory::sampling(const Draws& draws) const {
  const auto count = static_cast<int64_t>(draws.size());
  fp::SampleOptions options;
  options.temperatures = view(temperatures_, fp::DType::kFloat32, count);
  options.seeds = view(seeds_, fp::DType::kInt64, count);
  options.offsets = view(offsets_, fp::DType::kInt64, count);
  if (!has_filters(draws)) return options;
  options.top_ks = view(top_ks_, fp::DType::kInt32, count);
  options.top_ps = view(top_ps_, fp::DType::kFloat32, count);
  options.min_ps = view(min_ps_, fp::DType::kFloat32, count);
  return options;
}

fp::PenaltyOptions StepMemory::repetition(const Draws& draws) const {
  fp::PenaltyOptions penalties;
  const auto count = static_cast<int64_t>(draws.size());
  penalties.repetitions = view(repetitions_, fp::DType::kFloat32, count);
  return penalties;
}

fp::PenaltyOptions StepMemory::of_new_tokens(const Draws& draws) const {
  fp::PenaltyOptions penalties;
  const auto count = static_cast<int64_t>(draws.size());
  penalties.presences = view(presences_, fp::DType::kFloat32, count);
  penalties.frequencies = view(frequencies_, fp::DType::kFloat32, count);
  return penalties;
}

fp::SampleOutputs StepMemory::outputs(const Draws& draws) const {
  const auto count = static_cast<int64_t>(draws.size());
  fp::SampleOutputs outputs;
  outputs.ids = view(ids_, fp::DType::kInt32, count);
  outputs.logprobs_of = fp::LogprobsOf::kRaw;
  if (draws.num_logprobs >= 0) outputs.logprobs = view(logprobs_, fp::DType::kFloat32, count);
  if (draws.num_logprobs <= 0) return outputs;
  auto* const base = static_cast<std::byte*>(memory_.get());
  outputs.top_ids = fp::contiguous(base + likeliest_tokens_, fp::DType::kInt32, device_->place(),
                                   {count, draws.num_logprobs});
  outputs.top_logprobs = fp::contiguous(base + likeliest_logprobs_, fp::DType::kFloat32,
                                        device_->place(), {count, draws.num_logprobs});
  return outputs;
}

std::size_t StepMemory::reserve(std::size_t count, std::size_t size) {
  const std::size_t offset = num_bytes_;
  num_bytes_ += (count * size + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
}

fp::TensorView StepMemory::view(std::size_t offset, fp::DType dtype, int64_t count) const {
  return fp::contiguous(static_cast<std::byte*>(memory_.get()) + offset, dtype, device_->place(),
                        {count});
}

}  // namespace engine
