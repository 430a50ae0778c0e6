// SPDX-License-Identifier: Apache-2.0
// A model on a device: flashplan's operators, and products of matrices between them.
#pragma once

#include <flashplan/flashplan.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "backend.h"
#include "device.h"
#include "engine/engine.h"
#include "model.h"
#include "step_memory.h"

namespace engine {

class ModelBackend final : public Backend {
 public:
  /// Allocates all memory that steps need, and records graphs if the device has them. Throws
  /// std::runtime_error if flashplan has no kernel for the shape of the model.
  ModelBackend(Model model, std::unique_ptr<Device> device, const Options& options);

  ~ModelBackend() override { device_->synchronize(); }

  void start(const Step& step) override;
  void finish(Drawn* drawn) override;
  DeviceTimes times() const override { return device_->times(); }

  /// The logits that the tokens of the last step were drawn from: [>= draws, vocab] float32, in
  /// memory of the device.
  const float* logits() const { return static_cast<const float*>(logits_.get()); }

 private:
  using Memory = std::shared_ptr<void>;

  /// Two plans for batches of decodes, and one for all other batches. The plans for decodes launch
  /// one kernel for a run, and only they have graphs. There are two, because a plan keeps the
  /// kernel of its graphs, and for shared prefixes another kernel may be faster.
  struct Plans {
    flashplan::Plan decodes, sharing_decodes, mixed;
  };

  void create_plans();
  void allocate();
  /// Multiplies once for each number of rows: on a GPU the first product of a shape takes long.
  void choose_products();
  void record_graphs();
  /// The number of sequences that the graph for a step has room for; 0: there is no graph.
  int64_t graph_size(const Step& step) const;
  /// The lengths and shared prefixes of a step, for plan(). Valid until the next call.
  flashplan::Batch batch_of(const Step& step);
  /// Computes the logits of all draws from the tokens.
  void forward(const StepSize& size, flashplan::Plan* plan);
  /// Computes out_, the attention of the tokens of a step. x_ has their normalised hidden states.
  void attend(const StepSize& size, int32_t layer, flashplan::Plan* plan);
  void feed_forward(const Layer& layer, int64_t num_tokens);
  void draw(const Draws& draws);
  void penalize(const flashplan::TensorView& logits, const History& history,
                const flashplan::PenaltyOptions& penalties, std::shared_ptr<void>* memory);
  /// y = x w^T. The parts of w give consecutive columns of y. `y_stride`: from row to row of y.
  void multiply(const Memory& x, int64_t rows, const Matrix& w, const Memory& y, int64_t y_stride,
                flashplan::DType y_dtype);

  /// A view of rows without gaps, of the device's dtype.
  flashplan::TensorView rows(const Memory& memory, int64_t count, int64_t columns) const;
  flashplan::TensorView weights(const DeviceWeights& values, int64_t size) const;
  /// A view of the caches of one layer.
  flashplan::TensorView cache_of(const Memory& caches, int32_t layer) const;
  Memory allocate_rows(int64_t rows, int64_t columns, flashplan::DType dtype) const;

  Model model_;
  Options options_;
  std::unique_ptr<Device> device_;
  StepMemory memory_;
  Plans plans_;
  std::size_t workspace_bytes_ = 0;
  Memory workspace_;
  bool has_pdl_;
  flashplan::DType cache_dtype_;
  Memory k_caches_, v_caches_;  // [layers, pages, page_size, kv_heads, head_dim]
  // A row for each token of the step.
  Memory token_ids_;   // int32
  Memory hidden_, x_;  // [hidden] the residual stream, and its normalised rows
  Memory qkv_;         // [(qo_heads + 2 * kv_heads) * head_dim]
  Memory out_;         // [qo_heads * head_dim]
  Memory gate_up_;     // [2 * ffn]
  Memory ffn_;         // [ffn]
  // A row for each draw.
  Memory last_;                     // [hidden]
  Memory logits_;                   // [vocab] float32
  Memory all_tokens_, new_tokens_;  // History::tokens and lens, with and without the prompts
  std::vector<int32_t> shared_prefixes_;
};

}  // namespace engine
