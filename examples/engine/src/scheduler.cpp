// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include <algorithm>
#include <span>
#include <utility>

namespace engine {

Scheduler::Scheduler(const Options& options, PageCache* cache)
    : max_batch_size_(options.max_batch_size),
      max_step_tokens_(options.max_step_tokens),
      cache_(cache) {}

void Scheduler::add(std::unique_ptr<Sequence> sequence) { waiting_.push_back(std::move(sequence)); }

// --8<-- [start:schedule]
const std::vector<Chunk>& Scheduler::schedule() {
  make_room();
  admit();
  // The oldest sequences come first. admit() takes care that the budget ends within the youngest
  // one, so all others are past their prompts after this step, and no prompt delays a decode.
  int32_t budget = max_step_tokens_;
  chunks_.clear();
  for (const auto& sequence : running_) {
    if (sequence->is_complete()) continue;
    const int32_t num_tokens = std::min(sequence->num_uncached(), budget);
    chunks_.push_back({sequence.get(), num_tokens, num_tokens == sequence->num_uncached()});
    budget -= num_tokens;
  }
  return chunks_;
}
// --8<-- [end:schedule]

void Scheduler::complete_step() {
  for (const Chunk& chunk : chunks_) {
    Sequence& s = *chunk.sequence;
    s.num_cached += chunk.num_tokens;
    publish(&s);
    if (s.num_cached >= s.num_prompt_tokens()) s.shared->prompt_is_cached = true;
  }
}

void Scheduler::remove(Sequence* sequence) {
  publish(sequence);
  cache_->release(&sequence->pages);
  const auto is_it = [=](const auto& other) { return other.get() == sequence; };
  if (std::erase_if(running_, is_it) == 0) std::erase_if(waiting_, is_it);
}

std::vector<int32_t> Scheduler::remove_request(RequestId request, int32_t sample) {
  std::vector<int32_t> samples;
  const auto is_of_request = [&](const auto& sequence) {
    if (sequence->shared->id != request) return false;
    if (sample != kAllSamples && sequence->sample != sample) return false;
    samples.push_back(sequence->sample);
    sequence->shared->prompt_is_cached = true;  // so that other samples do not wait for this one
    cache_->release(&sequence->pages);
    return true;
  };
  std::erase_if(running_, is_of_request);
  std::erase_if(waiting_, is_of_request);
  chunks_.clear();
  return samples;
}

void Scheduler::preempt_youngest() {
  std::unique_ptr<Sequence> sequence = std::move(running_.back());
  running_.pop_back();
  publish(sequence.get());
  cache_->release(&sequence->pages);
  waiting_.push_front(std::move(sequence));
  ++num_preemptions_;
}

void Scheduler::publish(Sequence* sequence) {
  const int32_t end = std::min(sequence->num_cached, sequence->num_known_tokens());
  if (sequence->pages.empty() || end <= sequence->num_published) return;
  const std::span<const int32_t> tokens(sequence->tokens);
  cache_->publish(tokens.first(static_cast<std::size_t>(end)), sequence->num_published,
                  &sequence->pages);
  sequence->num_published = end;
}

void Scheduler::make_room() {
  for (std::size_t i = 0; i < running_.size(); ++i) {
    const int32_t num_tokens = running_[i]->num_cached + running_[i]->num_uncached();
    const auto num_pages = static_cast<std::size_t>(cache_->pages_for(num_tokens));
    while (i < running_.size() && running_[i]->pages.size() < num_pages) {
      if (!cache_->grow(&running_[i]->pages)) preempt_youngest();
    }
  }
}

void Scheduler::admit() {
  int64_t num_tokens = 0;  // tokens that running sequences have still to compute
  for (const auto& sequence : running_) num_tokens += sequence->num_uncached();
  while (!waiting_.empty() && num_running() < max_batch_size_ && num_tokens < max_step_tokens_) {
    Sequence& sequence = *waiting_.front();
    if (sequence.sample > 0 && !sequence.shared->prompt_is_cached) break;
    if (sequence.is_complete()) break;  // its last token will be known before the next step
    const int32_t num_cached = cache_->acquire(sequence.tokens, num_running(), &sequence.pages);
    if (num_cached < 0) break;
    sequence.num_cached = sequence.num_published = num_cached;
    num_reused_tokens_ += num_cached;
    num_tokens += sequence.num_uncached();
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

}  // namespace engine
