// SPDX-License-Identifier: Apache-2.0
// A model on the CPU, in float32.
#pragma once

#include <flashplan/flashplan.h>

#include <cstddef>
#include <vector>

#include "backend.h"
#include "engine/engine.h"
#include "model.h"
#include "products.h"

namespace engine {

class CpuBackend final : public Backend {
 public:
  /// Allocates all that steps need. Throws std::runtime_error if flashplan has no attention for the
  /// shape of the model.
  CpuBackend(Model model, const Options& options);

  void run(const Step& step, Drawn* drawn) override;

  /// [>= draws of the last step, vocab]: the logits that its tokens were drawn from.
  const std::vector<float>& logits() const { return logits_; }

 private:
  struct alignas(flashplan::kWorkspaceAlignment) WorkspaceBlock {
    std::byte bytes[flashplan::kWorkspaceAlignment];
  };

  void plan(const Step& step);
  void forward(const Step& step);
  /// out_ = attention of the tokens, whose norms are in x_.
  void attend(const Step& step, int32_t layer);
  void feed_forward(const Layer& layer, int64_t num_tokens);
  /// A view of the caches of one layer.
  flashplan::TensorView cache_of(std::vector<float>& cache, int32_t layer) const;

  Model model_;
  Options options_;
  Multiply multiply_;
  flashplan::Plan plan_;
  std::vector<WorkspaceBlock> workspace_;
  std::vector<float> k_cache_, v_cache_;  // [layers, pages, page_size, kv_heads, head_dim]
  // A row for each token of the step.
  std::vector<float> hidden_, x_;  // [hidden]; the residual stream, and its norm
  std::vector<float> qkv_;         // [(qo_heads + 2 * kv_heads) * head_dim]
  std::vector<float> out_;         // [qo_heads * head_dim]
  std::vector<float> gate_up_;     // [2 * ffn]
  std::vector<float> ffn_;         // [ffn]
  // A row for each draw.
  std::vector<float> last_;    // [hidden]
  std::vector<float> logits_;  // [vocab]
  std::vector<int32_t> shared_prefixes_;
};

}  // namespace engine
