// SPDX-License-Identifier: Apache-2.0
// Models of random weights that are small enough for thousands of steps.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "cpu_device.h"
#include "model_backend.h"

namespace engine {

/// `type`: llama or qwen3. A Llama has untied embeddings and its rotation is scaled.
inline ModelConfig tiny_config(const std::string& type) {
  const bool is_llama = type == "llama";
  return parse_model_config(
      R"({"vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
          "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-5,
          "model_type": ")" +
      type + R"(", "eos_token_id": [3, 5], "tie_word_embeddings": )" +
      (is_llama ? "false" : "true") + R"(, "rope_theta": 1000.0, "rope_scaling": )" +
      (is_llama ? R"({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 64})"
                : "null") +
      "}");
}

/// Weights with which a token is not simply followed by itself: what layers add is large.
class LivelyWeights final : public WeightSource {
 public:
  Weights load(const std::string& name, const std::vector<int64_t>& shape) override {
    const Weights plain = random_->load(name, shape);
    if (shape.size() == 1) return plain;
    const float scale = name.find("embed") != std::string::npos ? 0.1F : 3.0F;
    const auto count = static_cast<std::size_t>(shape[0] * shape[1]);
    const std::shared_ptr<float> scaled(new float[count], std::default_delete<float[]>());
    for (std::size_t i = 0; i < count; ++i) scaled.get()[i] = scale * plain.get()[i];
    return scaled;
  }

 private:
  std::unique_ptr<WeightSource> random_ = random_weights(1);
};

/// A model for the CPU. Any CpuDevice may use its weights.
inline Model cpu_model(const ModelConfig& config, WeightSource& source) {
  CpuDevice device({});
  return load_model(config, source, device);
}

inline Model tiny_model(const std::string& type) {
  LivelyWeights source;
  return cpu_model(tiny_config(type), source);
}

inline std::unique_ptr<ModelBackend> cpu_backend(Model model, const Options& options) {
  return std::make_unique<ModelBackend>(std::move(model), std::make_unique<CpuDevice>(options),
                                        options);
}

}  // namespace engine
