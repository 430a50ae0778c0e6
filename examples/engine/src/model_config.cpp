// SPDX-License-Identifier: Apache-2.0
#include "model_config.h"

#include <cerrno>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

#include "json.h"

namespace engine {

namespace {

[[noreturn]] void refuse(const std::string& key, const std::string& expected,
                         const std::string& got) {
  throw std::invalid_argument(key + ": expected " + expected + ", got " + got);
}

int32_t size_of(const Json& config, const char* key) {
  const int64_t value = config.at(key).integer();
  if (value < 1 || value > std::numeric_limits<int32_t>::max()) {
    refuse(key, "a positive int32", std::to_string(value));
  }
  return static_cast<int32_t>(value);
}

double number_or(const Json& config, const char* key, double otherwise) {
  const Json& value = config.find(key);
  return value.is_null() ? otherwise : value.number();
}

bool is_true(const Json& config, const char* key) {
  const Json& value = config.find(key);
  return !value.is_null() && value.boolean();
}

/// Reads the rotation. Older files have rope_theta and rope_scaling; newer ones have the members of
/// both in rope_parameters.
flashplan::Rope parse_rope(const Json& config) {
  const Json& newer = config.find("rope_parameters");
  const Json& scaling = newer.is_null() ? config.find("rope_scaling") : newer;
  flashplan::Rope rope;
  rope.theta = number_or(newer.is_null() ? config : newer, "rope_theta", 10000.0);
  if (scaling.is_null()) return rope;
  const Json& older_type = scaling.find("type");
  const std::string& type = (older_type.is_null() ? scaling.at("rope_type") : older_type).string();
  if (type == "default") return rope;
  rope.scale = scaling.at("factor").number();
  if (type == "linear") return rope;
  if (type != "llama3") refuse("rope_type", "default, linear or llama3", type);
  rope.scaling = flashplan::RopeScaling::kLlama3;
  rope.low_freq_factor = scaling.at("low_freq_factor").number();
  rope.high_freq_factor = scaling.at("high_freq_factor").number();
  rope.original_length = scaling.at("original_max_position_embeddings").number();
  return rope;
}

std::vector<int32_t> parse_stop_tokens(const Json& eos) {
  std::vector<int32_t> tokens;
  if (eos.is_null()) return tokens;
  for (const Json& token : eos.is_array() ? eos.array() : Json::Array{eos}) {
    tokens.push_back(static_cast<int32_t>(token.integer()));
  }
  return tokens;
}

}  // namespace

ModelConfig parse_model_config(std::string_view json) {
  const Json config = Json::parse(json);
  const std::string& type = config.at("model_type").string();
  if (type != "llama" && type != "qwen3") refuse("model_type", "llama or qwen3", type);
  for (const char* key : {"attention_bias", "mlp_bias", "use_sliding_window"}) {
    if (is_true(config, key)) refuse(key, "false", "true");
  }
  const std::string& activation = config.at("hidden_act").string();
  if (activation != "silu") refuse("hidden_act", "silu", activation);

  ModelConfig result;
  result.vocab = size_of(config, "vocab_size");
  result.hidden = size_of(config, "hidden_size");
  result.ffn = size_of(config, "intermediate_size");
  result.num_layers = size_of(config, "num_hidden_layers");
  result.num_qo_heads = size_of(config, "num_attention_heads");
  const bool has_groups = !config.find("num_key_value_heads").is_null();
  result.num_kv_heads = has_groups ? size_of(config, "num_key_value_heads") : result.num_qo_heads;
  const bool has_head_dim = !config.find("head_dim").is_null();
  result.head_dim =
      has_head_dim ? size_of(config, "head_dim") : result.hidden / result.num_qo_heads;
  result.max_tokens = size_of(config, "max_position_embeddings");
  result.norm_eps = static_cast<float>(number_or(config, "rms_norm_eps", 1e-6));
  result.has_head_norms = type == "qwen3";
  result.has_tied_embeddings = is_true(config, "tie_word_embeddings");
  result.rope = parse_rope(config);
  result.stop_tokens = parse_stop_tokens(config.find("eos_token_id"));
  return result;
}

ModelConfig read_model_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw std::system_error(errno, std::generic_category(), path.string());
  return parse_model_config(text);
}

}  // namespace engine
