// SPDX-License-Identifier: Apache-2.0
// The weights of a model.
#pragma once

#include <vector>

#include "checkpoint.h"
#include "model_config.h"

namespace engine {

struct Layer {
  Weights attention_norm, ffn_norm;  // [hidden]
  Weights q, k, v;                   // [heads * head_dim, hidden]
  Weights q_norm, k_norm;            // [head_dim]; null in models without them
  Weights o;                         // [hidden, heads * head_dim]
  Weights gate, up;                  // [ffn, hidden]
  Weights down;                      // [hidden, ffn]
};

struct Model {
  ModelConfig config;
  Weights embedding;  // [vocab, hidden]
  std::vector<Layer> layers;
  Weights norm;    // [hidden]
  Weights output;  // [vocab, hidden]; may be the embedding
};

/// Throws std::invalid_argument if weights are missing or have another shape.
Model load_model(const ModelConfig& config, WeightSource& source);

}  // namespace engine
