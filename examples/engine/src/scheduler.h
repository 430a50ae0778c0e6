// SPDX-License-Identifier: Apache-2.0
// Which sequences a step computes, and how many tokens of each.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "page_cache.h"
#include "sequence.h"

namespace engine {

inline constexpr int32_t kAllSamples = -1;

/// The tokens of a sequence that a step computes: the next num_tokens that are not cached.
struct Chunk {
  Sequence* sequence = nullptr;
  int32_t num_tokens = 0;
  bool has_draw = false;  // these are all of them, so the next token is drawn
};

/// First come, first served, and all in one batch: each step has one token of every sequence that
/// decodes, and the rest of the budget goes to prompts, oldest first.
///
/// A sequence is admitted if there are pages for all its tokens, and one more for each running
/// sequence. If a running one then finds no page for a new token, the youngest is preempted: it
/// gives its pages back and waits again, to be computed anew from what the cache still has. So the
/// oldest sequence is never stopped, and each one becomes the oldest: none starves.
class Scheduler {
 public:
  Scheduler(const Options& options, PageCache* cache);

  /// Adds a sequence behind all others.
  void add(std::unique_ptr<Sequence> sequence);
  /// The next step. Empty only if no sequence is left, or if the last tokens of those that run are
  /// being drawn. Valid until the next call of a function.
  const std::vector<Chunk>& schedule();
  /// Publishes the pages that the last step fills. It need not have ended, if the backend computes
  /// all steps in their order.
  void complete_step();
  /// Takes a sequence out and gives its pages back.
  void remove(Sequence* sequence);
  /// Takes a sample of a request out, or all of them if `sample` is kAllSamples; returns which were
  /// there.
  std::vector<int32_t> remove_request(RequestId request, int32_t sample);
  /// Stops the youngest running sequence; there must be one.
  void preempt_youngest();

  bool is_idle() const { return waiting_.empty() && running_.empty(); }
  int32_t num_running() const { return static_cast<int32_t>(running_.size()); }
  int32_t num_waiting() const { return static_cast<int32_t>(waiting_.size()); }
  int64_t num_preemptions() const { return num_preemptions_; }
  int64_t num_reused_tokens() const { return num_reused_tokens_; }

 private:
  /// Gives each running sequence the pages for all its tokens.
  void make_room();
  /// Lets others find the full pages of a sequence whose tokens are known.
  void publish(Sequence* sequence);
  /// Lets sequences begin while those that run leave some of the budget.
  void admit();

  int32_t max_batch_size_, max_step_tokens_;
  PageCache* cache_;
  std::deque<std::unique_ptr<Sequence>> waiting_;   // oldest first
  std::vector<std::unique_ptr<Sequence>> running_;  // all of them older than those that wait
  std::vector<Chunk> chunks_;
  int64_t num_preemptions_ = 0;
  int64_t num_reused_tokens_ = 0;
};

}  // namespace engine
