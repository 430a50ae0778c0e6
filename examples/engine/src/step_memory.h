// SPDX-License-Identifier: Apache-2.0
// The small tensors of a step, in one block of the device's memory: the inputs that the host sends,
// and the tokens and log-probabilities that are drawn.
#pragma once

#include <flashplan/flashplan.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backend.h"
#include "device.h"
#include "engine/engine.h"
#include "model_config.h"

namespace engine {

/// How many rows the tensors of a step have.
struct StepSize {
  int64_t tokens = 0;
  int64_t batch = 0;
  int64_t draws = 0;
};

/// All tensors keep their addresses, so that captured graphs may read them. The tokens that a step
/// draws lie before the tokens that the host sends, so that both can be gathered as rows of one
/// tensor, the pool.
class StepMemory {
 public:
  StepMemory(const ModelConfig& config, const Options& options, Device* device);

  /// Copies a step to the device. If `size` has more sequences or draws than the step, the others
  /// become empty.
  void send(const Step& step, const StepSize& size);
  /// Begins to copy what a step drew to the host.
  void fetch(int64_t num_draws, int32_t num_logprobs);
  /// Waits for the oldest copy of fetch(), and writes it to `drawn`.
  void wait(Drawn* drawn);

  // Views of the tensors of the last step.
  flashplan::TensorView pool() const;  // [draws + tokens, 1]: draws of the step before, then tokens
  flashplan::TensorView sources(const StepSize& size) const;  // [tokens]: rows of the pool
  flashplan::TensorView qo_indptr(const StepSize& size) const;
  flashplan::TensorView kv_lens(const StepSize& size) const;
  flashplan::TensorView page_indptr(const StepSize& size) const;
  flashplan::TensorView page_indices() const;
  flashplan::TensorView last_rows(const StepSize& size) const;
  flashplan::SampleOptions sampling(const Draws& draws) const;
  /// Penalties for all tokens of a sequence, and for those after the prompt.
  flashplan::PenaltyOptions repetition(const Draws& draws) const;
  flashplan::PenaltyOptions of_new_tokens(const Draws& draws) const;
  flashplan::SampleOutputs outputs(const Draws& draws) const;

 private:
  /// The arguments of a call of fetch().
  struct Fetched {
    int64_t num_draws = 0;
    int32_t num_logprobs = -1;
  };

  std::size_t reserve(std::size_t count, std::size_t size);
  flashplan::TensorView view(std::size_t offset, flashplan::DType dtype, int64_t count) const;

  Device* device_;
  std::size_t num_bytes_ = 0;
  std::size_t likeliest_logprobs_, likeliest_tokens_, logprobs_, ids_;
  std::size_t tokens_;  // the first of the tensors that the host sends
  std::size_t sources_, qo_indptr_, kv_lens_, page_indptr_, last_rows_;
  std::size_t temperatures_, top_ks_, top_ps_, min_ps_, seeds_, offsets_;
  std::size_t repetitions_, presences_, frequencies_;
  std::size_t page_indices_;
  int64_t max_draws_, max_tokens_, max_pages_;
  std::shared_ptr<void> memory_;
  Fetched fetched_[2];
  std::size_t num_fetched_ = 0, num_waited_for_ = 0;
};

}  // namespace engine
