// SPDX-License-Identifier: Apache-2.0
// Configurations and checkpoints: what is read, and what is refused.
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>

#include "check.h"
#include "drive.h"
#include "engine/engine.h"
#include "json.h"

using namespace engine;
namespace fs = std::filesystem;

namespace {

/// A temporary folder, which the destructor deletes.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "engine-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }

  const fs::path& path() const { return path_; }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
  }

 private:
  fs::path path_;
};

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

std::string safetensors(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  std::string bytes(sizeof(size), '\0');
  std::memcpy(bytes.data(), &size, sizeof(size));
  return bytes + header + data;
}

/// Keeps what is loaded from random weights, so that it can be written to files.
class Recorder final : public WeightSource {
 public:
  Weights load(const std::string& name, const std::vector<int64_t>& shape) override {
    const Weights weights = lively_.load(name, shape);
    std::size_t count = 1;
    std::string sizes;
    for (const int64_t size : shape) {
      count *= static_cast<std::size_t>(size);
      sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    }
    // float32 in the first file, bfloat16 in the second one.
    const int file = num_loaded_++ % 2;
    std::string& data = data_[file];
    const std::size_t begin = data.size();
    std::shared_ptr<float> kept(new float[count], std::default_delete<float[]>());
    for (std::size_t i = 0; i < count; ++i) {
      uint32_t bits = std::bit_cast<uint32_t>(weights.get()[i]);
      if (file == 1) bits &= 0xffff0000;
      const char* bytes = reinterpret_cast<const char*>(&bits);
      data.append(bytes + 2 * file, bytes + 4);
      kept.get()[i] = std::bit_cast<float>(bits);
    }
    headers_[file] += (headers_[file].empty() ? "" : ",\n") + ("\"" + name) + R"(": {"dtype": ")" +
                      (file == 0 ? "F32" : "BF16") + R"(", "shape": [)" + sizes +
                      R"(], "data_offsets": [)" + std::to_string(begin) + ", " +
                      std::to_string(data.size()) + "]}";
    return kept;
  }

  /// Writes the files. `padding`: spaces after the headers, which change the alignment of the data.
  void write(const Folder& folder, int padding) const {
    for (int file = 0; file < 2; ++file) {
      const std::string header = R"({"__metadata__": {"format": "pt"}, )" + headers_[file] + "}";
      const std::size_t aligned = (header.size() + 7) / 8 * 8 + static_cast<std::size_t>(padding);
      const std::string spaces(aligned - header.size(), ' ');
      folder.write("model-" + std::to_string(file) + ".safetensors",
                   safetensors(header + spaces, data_[file]));
    }
  }

 private:
  LivelyWeights lively_;
  int num_loaded_ = 0;
  std::string headers_[2], data_[2];
};

const std::string kConfig =
    R"({"model_type": "llama", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
        "hidden_act": "silu"})";

/// kConfig with one more key before the others, or with `from` replaced.
std::string config_with(const std::string& members) {
  return "{" + members + ", " + kConfig.substr(1);
}
std::string config_but(const std::string& from, const std::string& to) {
  std::string config = kConfig;
  return config.replace(config.find(from), from.size(), to);
}

}  // namespace

TEST(json) {
  const Json value = Json::parse(
      R"( {"a": [1, -2.5e1, true, false, null, "x\"\\\/\b\f\n\r\tA\u00e9\u20ac"], "b": {}, "c": []} )");
  const Json::Array& items = value.at("a").array();
  CHECK_EQ(items.size(), 6U);
  CHECK_EQ(items[0].integer(), 1);
  CHECK(items[1].number() == -25.0);
  CHECK(items[2].boolean() && !items[3].boolean() && items[4].is_null());
  CHECK_EQ(items[5].string(), "x\"\\/\b\f\n\r\tA\xc3\xa9\xe2\x82\xac");
  CHECK(value.at("b").object().empty() && value.at("c").array().empty());
  CHECK(value.find("d").is_null());
  CHECK_EQ(refusal([&] { (void)value.at("d"); }), "JSON: expected the key d, got something else");
  CHECK_EQ(refusal([&] { (void)items[1].string(); }),
           "JSON: expected a string, got something else");
  CHECK_EQ(refusal([] { (void)Json::parse("1.5").integer(); }),
           "JSON: expected an integer, got something else");
}

TEST(malformed_json) {
  const std::string whole = R"({"a": [1, true, null, "\u0041\n"], "b": {"c": -1e3}})";
  CHECK_EQ(refusal([&] { Json::parse(whole); }), "no error");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CHECK(refusal([&] { Json::parse(whole.substr(0, size)); }) != "no error");
  }
  for (const char* text : {"[1,]", "{1: 2}", "[1 2]", "nul", "tru", "\"\\x\"", "\"\\u00g0\"",
                           "1e999", "{} 1", "{\"a\" 1}", "+1", "-"}) {
    CHECK(refusal([&] { Json::parse(text); }) != "no error");
  }
  CHECK(refusal([] { Json::parse(std::string(100000, '[')); }) != "no error");
}

TEST(configurations) {
  const ModelConfig plain = parse_model_config(kConfig);
  CHECK_EQ(plain.num_kv_heads, 4);
  CHECK_EQ(plain.head_dim, 6);
  CHECK(!plain.has_head_norms && !plain.has_tied_embeddings && plain.stop_tokens.empty());
  CHECK(plain.rope.theta == 10000.0 && plain.norm_eps == 1e-6F);
  CHECK(parse_model_config(config_with(R"("eos_token_id": 7)")).stop_tokens == std::vector{7});
  const ModelConfig linear = parse_model_config(
      config_with(R"("rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4})"));
  CHECK(linear.rope.theta == 5e5 && linear.rope.scale == 4.0);
  const ModelConfig newer = parse_model_config(config_with(
      R"("rope_parameters": {"rope_type": "llama3", "rope_theta": 3e5, "factor": 8,
          "low_freq_factor": 0.5, "high_freq_factor": 3, "original_max_position_embeddings": 99})"));
  CHECK(newer.rope.theta == 3e5 && newer.rope.scale == 8.0 && newer.rope.original_length == 99.0);
  CHECK(newer.rope.scaling == flashplan::RopeScaling::kLlama3);
  CHECK(newer.rope.low_freq_factor == 0.5 && newer.rope.high_freq_factor == 3.0);
  const ModelConfig tiny = tiny_config("qwen3");
  CHECK(tiny.has_head_norms && tiny.has_tied_embeddings && tiny.head_dim == 8);
}

TEST(configurations_of_other_models) {
  const auto refuses = [](const std::string& config) {
    return refusal([&] { parse_model_config(config); });
  };
  CHECK_EQ(refuses(config_but("\"llama\"", "\"gpt2\"")),
           "model_type: expected llama or qwen3, got gpt2");
  CHECK_EQ(refuses(config_but("silu", "gelu")), "hidden_act: expected silu, got gelu");
  CHECK_EQ(refuses(config_with(R"("attention_bias": true)")),
           "attention_bias: expected false, got true");
  CHECK_EQ(refuses(config_but("50", "0")), "vocab_size: expected a positive int32, got 0");
  CHECK_EQ(refuses(config_but("\"vocab_size\"", "\"words\"")),
           "JSON: expected the key vocab_size, got something else");
  CHECK_EQ(refuses(config_with(R"("rope_scaling": {"rope_type": "yarn", "factor": 2})")),
           "rope_type: expected default, linear or llama3, got yarn");
}

TEST(checkpoints_serve_as_their_weights) {
  for (const char* type : {"llama", "qwen3"}) {
    const ModelConfig config = tiny_config(type);
    Recorder recorder;
    const Model model = cpu_model(config, recorder);
    CHECK_EQ(model.output.parts[0].values == model.embedding.parts[0].values,
             config.has_tied_embeddings);
    Options options;
    Request request;
    request.prompt = {1, 20, 33, 7};
    request.ignore_model_stops = true;
    const auto text_of = [&](Model weights) {
      Core core(config, cpu_backend(std::move(weights), options), options);
      return serve(core, {{request, 0}}).at({0, 0});
    };
    const auto expected = text_of(model);
    for (const int padding : {0, 1}) {
      const Folder folder;
      recorder.write(folder, padding);
      const auto source = open_checkpoint(folder.path());
      CHECK(text_of(cpu_model(config, *source)) == expected);
    }
  }
}

TEST(malformed_checkpoints) {
  const auto refuses = [](const std::string& bytes, const std::vector<int64_t>& shape = {2}) {
    const Folder folder;
    folder.write("a.safetensors", bytes);
    const std::string message = refusal([&] { open_checkpoint(folder.path())->load("w", shape); });
    const std::string prefix = folder.path() / "a.safetensors: ";
    return message.starts_with(prefix) ? message.substr(prefix.size()) : message;
  };
  const auto header = [](const std::string& dtype, const std::string& rest) {
    return R"({"w": {"dtype": ")" + dtype + R"(", "shape": [2], "data_offsets": )" + rest + "}}";
  };
  const std::string data(8, '\0');
  CHECK_EQ(refuses(safetensors(header("F32", "[0, 8]"), data)), "no error");
  CHECK_EQ(refuses(""), "expected the length of a header, got a shorter file");
  CHECK_EQ(refuses(data + "{}").substr(0, 5), "JSON:");
  CHECK_EQ(refuses(std::string(8, '\xff')), "expected a header, got a shorter file");
  CHECK_EQ(refuses(safetensors(header("F32", "[0]"), data)), "expected two data_offsets of w");
  for (const char* offsets : {"[0, 9]", "[-1, 7]", "[8, 0]", "[9007199254740992, 0]"}) {
    CHECK_EQ(refuses(safetensors(header("F32", offsets), data)),
             "expected data_offsets of w inside of the file");
  }
  CHECK_EQ(refuses(safetensors(header("F32", "[0, 4]"), data)),
           "w: expected the bytes of F32 [2], got 4");
  CHECK_EQ(refuses(safetensors(header("F16", "[0, 4]"), data)),
           "w: expected F32 or BF16 [2], got F16 [2]");
  CHECK_EQ(refuses(safetensors(header("F32", "[0, 8]"), data), {1, 2}),
           "w: expected F32 or BF16 [1, 2], got F32 [2]");
  const std::string other = R"({"v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})";
  CHECK_EQ(refuses(safetensors(other, data)), "w: no file has these weights");
  const Folder folder;
  CHECK_EQ(refusal([&] { open_checkpoint(folder.path()); }),
           folder.path().string() + ": expected *.safetensors, got none");
}

TEST(folders_are_loaded) {
  const Folder folder;
  bool is_missing = false;
  try {
    Engine::random(folder.path(), 1, {});
  } catch (const std::system_error& error) {
    is_missing = error.code() == std::errc::no_such_file_or_directory;
  }
  CHECK(is_missing);
  folder.write("config.json", kConfig);
  CHECK(refusal([&] { Engine::load(folder.path(), {}); }) != "no error");
  const auto engine = Engine::random(folder.path(), 1, {});
  Request request;
  request.prompt = {1, 2, 3};
  request.max_new_tokens = 1;
  engine->submit(request);
  const auto outputs = engine->poll(std::chrono::seconds(10));
  CHECK_EQ(outputs.size(), 1U);
}
