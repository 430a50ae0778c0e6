// SPDX-License-Identifier: Apache-2.0
// The core of an engine, which does one step after the other on one thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "backend.h"
#include "engine/engine.h"
#include "model_config.h"
#include "page_cache.h"
#include "scheduler.h"

namespace engine {

/// Throws std::invalid_argument for limits that no engine can keep.
void check_options(const Options& options);
/// Throws std::invalid_argument for a request that an engine with these limits can not serve.
void check_request(const Request& request, const ModelConfig& config, const Options& options);

class Core {
 public:
  Core(const ModelConfig& config, std::unique_ptr<Backend> backend, const Options& options);

  /// Adds a request that check_request() has accepted.
  void add(RequestId id, Request request);
  /// Ends a sample of a request, or all samples if `sample` is kAllSamples. Adds an output for each
  /// sample that was not finished.
  void abort(RequestId id, int32_t sample, std::vector<Output>* outputs);
  /// Begins a step, and adds the tokens of the step before. With Options::look_ahead off, adds the
  /// tokens of the step itself. Does nothing if there is no request.
  void step(std::vector<Output>* outputs);

  bool is_idle() const { return scheduler_.is_idle(); }
  /// When the next step should begin. An earlier begin would not end it earlier, because steps are
  /// under way, and it would miss requests that come until then.
  std::chrono::steady_clock::time_point next_begin() const { return next_begin_; }
  Statistics statistics() const;
  Scheduler& scheduler() { return scheduler_; }
  const PageCache& cache() const { return cache_; }

 private:
  /// A token that a step under way draws.
  struct Pending {
    Sequence* sequence = nullptr;  // null: it has ended meanwhile
    std::size_t place = 0;         // index of the token in the sequence
  };
  struct StepUnderWay {
    std::vector<Pending> pending;
    int32_t num_logprobs = -1;  // Draws::num_logprobs
    bool is_decode = false;     // each sequence has one token
  };

  /// Begins the next step; false if there is none.
  bool start_step();
  void fill_step(const std::vector<Chunk>& chunks);
  /// Waits for the oldest step under way, and adds its tokens.
  void finish_step(std::vector<Output>* outputs);
  void add_output(const Pending& pending, std::size_t draw, int32_t num_logprobs,
                  std::vector<Output>* outputs);
  /// Drops the tokens that steps under way draw for these sequences.
  void forget(RequestId request, int32_t sample);
  /// Sets next_begin_ after a step has ended. `was_decode`: StepUnderWay::is_decode of that step.
  void plan_begin(bool was_decode);
  Finish finish_of(const Sequence& sequence, std::size_t place) const;

  ModelConfig config_;
  Options options_;
  std::unique_ptr<Backend> backend_;
  PageCache cache_;
  Scheduler scheduler_;
  // Buffers that each step uses again.
  Step step_;
  Drawn drawn_;
  std::deque<StepUnderWay> under_way_;  // the oldest first; two at most
  std::chrono::steady_clock::time_point next_begin_{};
  double busy_seconds_ = 0;    // busy time of the device up to the end of the last step
  double decode_seconds_ = 0;  // time of the last step of decodes alone
  bool is_paused_ = true;      // there was nothing to do after the last step
  Statistics statistics_;
};

}  // namespace engine
