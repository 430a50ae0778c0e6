// SPDX-License-Identifier: Apache-2.0
#include "model.h"

#include <cstddef>
#include <utility>

namespace engine {

namespace {

class HostWeights final : public WeightLoader {
 public:
  HostWeights(WeightSource& source, Device& device) : source_(source), device_(device) {}

  DeviceWeights vector(const std::string& name, int64_t size) override {
    return device_.place_weights(source_.load(name, {size}), size);
  }

  Matrix matrix(const std::vector<std::string>& names, const std::vector<int64_t>& rows,
                int64_t inputs) override {
    Matrix result;
    result.inputs = inputs;
    for (std::size_t i = 0; i < names.size(); ++i) {
      const Weights values = source_.load(names[i], {rows[i], inputs});
      result.parts.push_back({device_.place_weights(values, rows[i] * inputs), rows[i]});
    }
    // On a GPU one product is faster than several, so parts are joined. On a CPU the weights stay
    // in the mapped file.
    return device_.place().type == flashplan::DeviceType::kCpu ? result : joined(result);
  }

 private:
  /// Copies the parts of a matrix into one piece of the device's memory.
  Matrix joined(const Matrix& matrix) {
    if (matrix.parts.size() == 1) return matrix;
    int64_t num_rows = 0;
    for (const Matrix::Part& part : matrix.parts) num_rows += part.rows;
    const int64_t row_bytes = matrix.inputs * flashplan::item_size(device_.dtype());
    const std::shared_ptr<void> memory =
        device_.allocate(static_cast<std::size_t>(num_rows * row_bytes));
    auto* to = static_cast<std::byte*>(memory.get());
    for (const Matrix::Part& part : matrix.parts) {
      const auto bytes = static_cast<std::size_t>(part.rows * row_bytes);
      device_.copy_on_device(to, part.values.get(), bytes);
      to += bytes;
    }
    return {{{memory, num_rows}}, matrix.inputs};
  }

  WeightSource& source_;
  Device& device_;
};

}  // namespace

Model load_model(const ModelConfig& c, WeightLoader& loader) {
  const int64_t q_size = int64_t{c.num_qo_heads} * c.head_dim;
  const int64_t kv_size = int64_t{c.num_kv_heads} * c.head_dim;
  Model model;
  model.config = c;
  model.embedding = loader.matrix({"model.embed_tokens.weight"}, {c.vocab}, c.hidden);
  for (int32_t i = 0; i < c.num_layers; ++i) {
    const auto name = [&](const char* part) {
      return "model.layers." + std::to_string(i) + "." + part + ".weight";
    };
    Layer layer;
    layer.attention_norm = loader.vector(name("input_layernorm"), c.hidden);
    layer.qkv = loader.matrix(
        {name("self_attn.q_proj"), name("self_attn.k_proj"), name("self_attn.v_proj")},
        {q_size, kv_size, kv_size}, c.hidden);
    if (c.has_head_norms) {
      layer.q_norm = loader.vector(name("self_attn.q_norm"), c.head_dim);
      layer.k_norm = loader.vector(name("self_attn.k_norm"), c.head_dim);
    }
    layer.o = loader.matrix({name("self_attn.o_proj")}, {c.hidden}, q_size);
    layer.ffn_norm = loader.vector(name("post_attention_layernorm"), c.hidden);
    layer.gate_up =
        loader.matrix({name("mlp.gate_proj"), name("mlp.up_proj")}, {c.ffn, c.ffn}, c.hidden);
    layer.down = loader.matrix({name("mlp.down_proj")}, {c.hidden}, c.ffn);
    model.layers.push_back(std::move(layer));
  }
  model.norm = loader.vector("model.norm.weight", c.hidden);
  model.output = c.has_tied_embeddings ? model.embedding
                                       : loader.matrix({"lm_head.weight"}, {c.vocab}, c.hidden);
  return model;
}

Model load_model(const ModelConfig& config, WeightSource& source, Device& device) {
  HostWeights loader(source, device);
  return load_model(config, loader);
}

}  // namespace engine
