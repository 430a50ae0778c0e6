// SPDX-License-Identifier: Apache-2.0
// What an engine does, step by step, on one thread.
#pragma once

#include <cstdint>
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
  /// Ends a sample of a request, or all of them if `sample` is kAllSamples; adds an output for each
  /// that is not finished.
  void abort(RequestId id, int32_t sample, std::vector<Output>* outputs);
  /// Computes one step and adds the tokens that it draws. Does nothing if there is no request.
  void step(std::vector<Output>* outputs);

  bool is_idle() const { return scheduler_.is_idle(); }
  Statistics statistics() const;
  Scheduler& scheduler() { return scheduler_; }
  const PageCache& cache() const { return cache_; }

 private:
  void fill_step(const std::vector<Chunk>& chunks);
  Finish finish_of(const Sequence& sequence) const;

  ModelConfig config_;
  Options options_;
  std::unique_ptr<Backend> backend_;
  PageCache cache_;
  Scheduler scheduler_;
  // Buffers of a step.
  Step step_;
  Drawn drawn_;
  std::vector<Sequence*> drawing_;
  Statistics statistics_;
};

}  // namespace engine
