// SPDX-License-Identifier: Apache-2.0
// Options that change how a model is computed, and what they may change of its results.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>

#include "check.h"
#include "drive.h"
#include "open_device.h"
#include "step_log.h"

using namespace engine;

namespace {

namespace fs = std::filesystem;

/// Five requests. The prompts of the first two have a prefix in common.
std::vector<Arrival> some_arrivals() {
  std::vector<Arrival> arrivals;
  for (int32_t i = 0; i < 5; ++i) {
    Request request;
    for (int32_t token = 0; token < 20 + i; ++token) {
      request.prompt.push_back((token * (i < 2 ? 5 : 7 + i) + 3) % 97);
    }
    request.max_new_tokens = 5 + i;
    request.ignore_model_stops = true;
    arrivals.push_back({request, i});
  }
  return arrivals;
}

/// The largest difference between the logits of two engines after one prompt, in standard
/// deviations of the logits.
double difference(const Options& a, const Options& b) {
  const auto logits_of = [](const Options& options) {
    const auto backend = cpu_backend(tiny_model("qwen3"), options);
    Step step;
    for (int32_t i = 0; i < 60; ++i) step.tokens.push_back(i * 11 % 97);
    step.qo_indptr = {0, 60};
    step.kv_lens = {60};
    step.page_indptr = {0, 4};
    step.page_indices = {3, 1, 0, 2};
    step.last_rows = {59};
    step.draws.add_likeliest(1);
    Drawn drawn(1);
    backend->start(step);
    backend->finish(&drawn);
    return std::vector<float>(backend->logits(), backend->logits() + 97);
  };
  const std::vector<float> x = logits_of(a), y = logits_of(b);
  double squares = 0, worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    squares += double{x[i]} * double{x[i]};
    worst = std::max(worst, std::abs(double{x[i]} - double{y[i]}));
  }
  return worst / std::sqrt(squares / 97);
}

Options small_options() {
  Options options;
  options.num_pages = 32;
  options.max_batch_size = 4;
  options.max_step_tokens = 64;
  return options;
}

}  // namespace

TEST(caches_of_8_bits_round) {
  Options options = small_options();
  options.has_8bit_cache = true;
  const double rounded = difference(small_options(), options);
  CHECK(rounded > 1e-4);
  CHECK(rounded < 0.5);
}

TEST(keys_are_cached_before_rotation_where_attention_rotates_them) {
  Options rotated = small_options();
  rotated.has_8bit_cache = true;  // one engine rounds keys after rotation, the other before it
  Options plain = rotated;
  plain.rotates_in_attention = true;
  CHECK(difference(rotated, plain) > 1e-4);
  CHECK(difference(small_options(), plain) < 0.5);
}

TEST(attention_may_be_left_out) {
  Options options = small_options();
  options.has_attention = false;
  CHECK(difference(small_options(), options) > 0.5);
}

TEST(sharing_prefixes_changes_no_token) {
  Options options = small_options();
  const Texts expected = serve(*tiny_core("qwen3", options), some_arrivals());
  options.shares_prefixes = false;
  CHECK(serve(*tiny_core("qwen3", options), some_arrivals()) == expected);
}

TEST(logs_have_the_lengths_and_pages_of_all_steps) {
  const fs::path path = fs::temp_directory_path() / ("engine_steps_" + std::to_string(getpid()));
  const Options options = small_options();
  int64_t num_tokens = 0;
  {
    Core core(tiny_config("qwen3"),
              std::make_unique<StepLog>(cpu_backend(tiny_model("qwen3"), options), path), options);
    serve(core, some_arrivals());
    num_tokens = core.statistics().computed_tokens;
  }
  std::ifstream file(path, std::ios::binary);
  const auto get = [&](int32_t count) {
    std::vector<int32_t> values(static_cast<std::size_t>(count));
    file.read(reinterpret_cast<char*>(values.data()), count * 4);
    return values;
  };
  int64_t logged_tokens = 0;
  while (file.peek() != std::ifstream::traits_type::eof()) {
    const std::vector<int32_t> sizes = get(3);
    const std::vector<int32_t> qo_indptr = get(sizes[0] + 1), kv_lens = get(sizes[0]);
    const std::vector<int32_t> page_indptr = get(sizes[0] + 1), page_indices = get(sizes[2]);
    CHECK(file.good());
    CHECK_EQ(qo_indptr.back(), sizes[1]);
    CHECK_EQ(page_indptr.back(), sizes[2]);
    for (std::size_t i = 0; i < kv_lens.size(); ++i) {
      CHECK(qo_indptr[i + 1] - qo_indptr[i] <= kv_lens[i]);
      CHECK_EQ(page_indptr[i + 1] - page_indptr[i], (kv_lens[i] + 15) / 16);
    }
    for (const int32_t page : page_indices) CHECK(page >= 0 && page < 32);
    logged_tokens += sizes[1];
  }
  CHECK_EQ(logged_tokens, num_tokens);
  fs::remove(path);
  bool is_refused = false;
  try {
    StepLog(cpu_backend(tiny_model("qwen3"), options), "/no such folder/steps");
  } catch (const std::system_error& error) {
    is_refused = error.code() == std::errc::no_such_file_or_directory;
  }
  CHECK(is_refused);
}

TEST(a_missing_gpu_is_an_error) {
  Options options;
  options.device = DeviceType::kCuda;
  try {
    CHECK(open_device(options)->place().type == flashplan::DeviceType::kCuda);
  } catch (const std::invalid_argument& error) {  // a build without CUDA
    CHECK_EQ(std::string(error.what()),
             "device: expected kCpu (built without the CUDA toolkit), got kCuda");
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).size() > 10);
  }
}
