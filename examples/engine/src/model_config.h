// SPDX-License-Identifier: Apache-2.0
// The shape of a model, as config.json of Hugging Face's transformers describes it.
#pragma once

#include <flashplan/flashplan.h>

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

namespace engine {

/// A model like Llama. Qwen3 differs from it only by norms of each head of queries and keys.
struct ModelConfig {
  int32_t vocab = 0;
  int32_t hidden = 0;
  int32_t ffn = 0;  // width of the feed-forward layers
  int32_t num_layers = 0;
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t max_tokens = 0;  // the longest sequence: the prompt and the tokens after it
  float norm_eps = 1e-6F;
  bool has_head_norms = false;
  bool has_tied_embeddings = false;  // the output matrix is the embedding
  flashplan::Rope rope;
  std::vector<int32_t> stop_tokens;
};

/// Throws std::invalid_argument for a malformed text, a missing key or a model of another kind.
ModelConfig parse_model_config(std::string_view json);
ModelConfig read_model_config(const std::filesystem::path& folder);

}  // namespace engine
