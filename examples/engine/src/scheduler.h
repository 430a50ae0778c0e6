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
  bool has_draw = false;  // these are all uncached tokens, so the next token is drawn
};

/// First come, first served, and all in one batch: each step has one token of every sequence that
/// decodes, and the rest of the budget goes to prompts, oldest first.
///
/// A sequence is admitted if there are pages for all its tokens, and one more for each running
/// sequence. If there is no page for a new token of a running sequence, the youngest sequence is
/// preempted: it gives its pages back and waits again. Later its tokens are computed anew, except
/// those that the cache still has. So the oldest sequence is never stopped, and each sequence
/// becomes the oldest one: none starves.
class Scheduler {
 public:
  Scheduler(const Options& options, PageCache* cache);

  /// Adds a sequence behind all others.
  void add(std::unique_ptr<Sequence> sequence);
  /// The chunks of the next step. Empty only if no sequence is left, or if the last tokens of all
  /// running sequences are being drawn. Valid until another function is called.
  const std::vector<Chunk>& schedule();
  /// Publishes the pages that the last step fills. The step need not have ended, because the
  /// backend computes steps in the order in which they begin.
  void complete_step();
  /// Takes a sequence out and gives its pages back.
  void remove(Sequence* sequence);
  /// Removes a sample of a request, or all samples if `sample` is kAllSamples. Returns the numbers
  /// of the samples that it removed.
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
  /// Publishes the full pages of a sequence whose tokens are known, so that others find them.
  void publish(Sequence* sequence);
  /// Admits waiting sequences as long as the running ones leave some of the budget of tokens.
  void admit();

  int32_t max_batch_size_, max_step_tokens_;
  PageCache* cache_;
  std::deque<std::unique_ptr<Sequence>> waiting_;   // oldest first
  std::vector<std::unique_ptr<Sequence>> running_;  // older than all that wait; oldest first
  std::vector<Chunk> chunks_;
  int64_t num_preemptions_ = 0;
  int64_t num_reused_tokens_ = 0;
};

}  // namespace engine
