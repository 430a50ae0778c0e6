// SPDX-License-Identifier: Apache-2.0
// The GPU draws the tokens of a dense model in float64 with the same weights, up to the errors of
// bfloat16. Without a GPU the tests say so and end.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "check.h"
#include "dense_model.h"
#include "drive.h"
#include "open_device.h"

using namespace engine;

namespace {

bool has_gpu() {
  Options options;
  options.device = DeviceType::kCuda;
  try {
    open_device(options);
    return true;
  } catch (const std::exception& error) {
    std::printf("skipped, no GPU: %s\n", error.what());
    return false;
  }
}

ModelConfig small_config(const std::string& type) {
  return parse_model_config(
      R"({"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
          "max_position_embeddings": 4096, "hidden_act": "silu", "model_type": ")" +
      type + R"(", "tie_word_embeddings": )" + (type == "llama" ? "false}" : "true}"));
}

/// Random weights that are exact in bfloat16.
class RoundedWeights final : public WeightSource {
 public:
  Weights load(const std::string& name, const std::vector<int64_t>& shape) override {
    const Weights exact = random_->load(name, shape);
    const auto count = static_cast<std::size_t>(
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
    const std::shared_ptr<float> rounded(new float[count], std::default_delete<float[]>());
    for (std::size_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<uint32_t>(exact.get()[i]);
      rounded.get()[i] = std::bit_cast<float>(bits & 0xffff0000U);
    }
    return rounded;
  }

 private:
  std::unique_ptr<WeightSource> random_ = random_weights(3);
};

std::unique_ptr<Core> gpu_core(const std::string& type, Options options) {
  options.device = DeviceType::kCuda;
  RoundedWeights source;
  std::unique_ptr<Device> device = open_device(options);
  Model model = load_model(small_config(type), source, *device);
  auto backend = std::make_unique<ModelBackend>(std::move(model), std::move(device), options);
  return std::make_unique<Core>(small_config(type), std::move(backend), options);
}

std::vector<Arrival> random_arrivals(int32_t count, int32_t max_prompt) {
  Random random(5);
  std::vector<Arrival> arrivals;
  for (int32_t i = 0; i < count; ++i) {
    Arrival arrival;
    arrival.request.prompt = random_prompt(random, max_prompt);
    arrival.request.max_new_tokens = pick(random, 1, 40);
    arrival.request.num_samples = pick(random, 0, 3) == 0 ? 3 : 1;
    arrival.request.ignore_model_stops = true;
    arrival.step = (i == 0 ? 0 : arrivals.back().step) + pick(random, 0, 3);
    arrivals.push_back(arrival);
  }
  return arrivals;
}

Options some_options() {
  Options options;
  options.num_pages = 512;
  options.max_batch_size = 12;
  options.max_step_tokens = 96;
  return options;
}

/// Checks that each token is nearly the most likely one. `tolerance`: how far its logit may be
/// below the largest one, in standard deviations of the logits.
void judge(const std::string& type, const Texts& texts, const std::vector<Arrival>& arrivals,
           double tolerance) {
  RoundedWeights source;
  const DenseModel dense(cpu_model(small_config(type), source));
  int64_t num_tokens = 0, num_others = 0;
  double worst = 0;
  for (const auto& [key, text] : texts) {
    const auto logits = dense.logits(text);
    const Request& request = arrivals[static_cast<std::size_t>(key.first)].request;
    CHECK_EQ(text.size(), request.prompt.size() + static_cast<std::size_t>(request.max_new_tokens));
    for (std::size_t i = request.prompt.size(); i < text.size(); ++i) {
      const std::vector<double>& row = logits[i - 1];
      double sum = 0, squares = 0;
      for (const double logit : row) {
        sum += logit;
        squares += logit * logit;
      }
      const auto count = static_cast<double>(row.size());
      const double deviation = std::sqrt(squares / count - sum * sum / count / count);
      const double best = *std::ranges::max_element(row);
      const double gap = (best - row[static_cast<std::size_t>(text[i])]) / deviation;
      worst = std::max(worst, gap);
      num_others += gap > 0;
      ++num_tokens;
    }
  }
  std::printf("  %s: %lld tokens, %lld not the likeliest, the worst by %.4f deviations\n",
              type.c_str(), static_cast<long long>(num_tokens), static_cast<long long>(num_others),
              worst);
  CHECK(num_tokens > 200);
  CHECK(worst <= tolerance);
  CHECK(num_others * 5 < num_tokens);
}

int64_t num_different(const Texts& a, const Texts& b) {
  int64_t count = 0;
  for (const auto& [key, text] : a) count += text != b.at(key);
  return count;
}

}  // namespace

TEST(tokens_are_those_of_a_dense_model) {
  if (!has_gpu()) return;
  const auto arrivals = random_arrivals(12, 60);
  for (const char* type : {"llama", "qwen3"}) {
    judge(type, serve(*gpu_core(type, some_options()), arrivals), arrivals, 0.25);
  }
}

TEST(prompts_in_many_chunks) {
  if (!has_gpu()) return;
  const auto arrivals = random_arrivals(6, 700);
  judge("llama", serve(*gpu_core("llama", some_options()), arrivals), arrivals, 0.25);
}

TEST(switches_do_not_change_tokens) {
  if (!has_gpu()) return;
  const auto arrivals = random_arrivals(12, 60);
  const Texts expected = serve(*gpu_core("llama", some_options()), arrivals);
  const auto compare = [&](const char* name, const Options& options) {
    const Texts texts = serve(*gpu_core("llama", options), arrivals);
    judge("llama", texts, arrivals, 0.25);
    std::printf("  %s: %lld of %zu texts differ\n", name,
                static_cast<long long>(num_different(expected, texts)), texts.size());
  };
  Options options = some_options();
  options.has_graphs = false;
  compare("without graphs", options);
  options = some_options();
  options.look_ahead = false;
  compare("without looking ahead", options);
  options = some_options();
  options.has_pdl = false;
  compare("without programmatic launches", options);
  options = some_options();
  options.shares_prefixes = false;
  compare("without shared prefixes", options);
  options = some_options();
  options.rotates_in_attention = true;
  compare("with keys rotated in attention", options);
}

TEST(caches_of_8_bits) {
  if (!has_gpu()) return;
  const auto arrivals = random_arrivals(12, 60);
  Options options = some_options();
  options.has_8bit_cache = true;
  judge("llama", serve(*gpu_core("llama", options), arrivals), arrivals, 0.6);
}

TEST(small_caches_and_penalties) {
  if (!has_gpu()) return;
  auto arrivals = random_arrivals(30, 60);
  for (std::size_t i = 0; i < arrivals.size(); ++i) {
    Sampling& sampling = arrivals[i].request.sampling;
    sampling.temperature = 1.0F;
    sampling.top_k = i % 3 == 0 ? 10 : INT32_MAX;
    sampling.repetition = i % 4 == 0 ? 1.3F : 1.0F;
    arrivals[i].request.num_logprobs = static_cast<int32_t>(i % 4) - 1;
  }
  Options options = some_options();
  options.num_pages = 14;
  const auto core = gpu_core("qwen3", options);
  const Texts texts = serve(*core, arrivals);
  for (const auto& [key, text] : texts) {
    const Request& request = arrivals[static_cast<std::size_t>(key.first)].request;
    CHECK_EQ(text.size(), request.prompt.size() + static_cast<std::size_t>(request.max_new_tokens));
    CHECK(std::ranges::all_of(text, [](int32_t token) { return token >= 0 && token < 512; }));
  }
  CHECK(core->statistics().preemptions > 0);
}
