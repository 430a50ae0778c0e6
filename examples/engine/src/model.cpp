// SPDX-License-Identifier: Apache-2.0
#include "model.h"

#include <string>

namespace engine {

Model load_model(const ModelConfig& c, WeightSource& source) {
  const int64_t q_size = int64_t{c.num_qo_heads} * c.head_dim;
  const int64_t kv_size = int64_t{c.num_kv_heads} * c.head_dim;
  Model model;
  model.config = c;
  model.embedding = source.load("model.embed_tokens.weight", {c.vocab, c.hidden});
  for (int32_t i = 0; i < c.num_layers; ++i) {
    const auto load = [&](const char* name, const std::vector<int64_t>& shape) {
      return source.load("model.layers." + std::to_string(i) + "." + name + ".weight", shape);
    };
    Layer layer;
    layer.attention_norm = load("input_layernorm", {c.hidden});
    layer.q = load("self_attn.q_proj", {q_size, c.hidden});
    layer.k = load("self_attn.k_proj", {kv_size, c.hidden});
    layer.v = load("self_attn.v_proj", {kv_size, c.hidden});
    if (c.has_head_norms) {
      layer.q_norm = load("self_attn.q_norm", {c.head_dim});
      layer.k_norm = load("self_attn.k_norm", {c.head_dim});
    }
    layer.o = load("self_attn.o_proj", {c.hidden, q_size});
    layer.ffn_norm = load("post_attention_layernorm", {c.hidden});
    layer.gate = load("mlp.gate_proj", {c.ffn, c.hidden});
    layer.up = load("mlp.up_proj", {c.ffn, c.hidden});
    layer.down = load("mlp.down_proj", {c.hidden, c.ffn});
    model.layers.push_back(std::move(layer));
  }
  model.norm = source.load("model.norm.weight", {c.hidden});
  model.output =
      c.has_tied_embeddings ? model.embedding : source.load("lm_head.weight", {c.vocab, c.hidden});
  return model;
}

}  // namespace engine
