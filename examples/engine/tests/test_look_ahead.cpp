// SPDX-License-Identifier: Apache-2.0
// Steps that begin before the last step has ended draw the same tokens as steps that begin later.
#include <algorithm>
#include <functional>

#include "check.h"
#include "drive.h"

using namespace engine;

namespace {

Request random_request(Random& random) {
  Request request;
  request.prompt = random_prompt(random, 30);
  request.max_new_tokens = pick(random, 1, 30);
  request.num_samples = pick(random, 0, 3) == 0 ? 3 : 1;
  request.ignore_model_stops = pick(random, 0, 1) == 0;
  for (int32_t i = pick(random, 0, 3); i > 0; --i) {
    request.stop_tokens.push_back(pick(random, 0, 96));
  }
  request.num_logprobs = pick(random, -1, 3);
  Sampling& sampling = request.sampling;
  sampling.temperature = pick(random, 0, 2) == 0 ? 0.0F : 1.0F;
  sampling.top_k = pick(random, 0, 2) == 0 ? 20 : INT32_MAX;
  sampling.seed = pick(random, 0, 1000);
  if (pick(random, 0, 7) == 0) sampling.repetition = 1.5F;
  if (pick(random, 0, 7) == 0) sampling.frequency = 0.5F;
  return request;
}

/// A CPU that behaves like a GPU with graphs: steps of decodes are padded to a few sizes, and each
/// size is always computed by calls with the same arguments.
class GraphDevice final : public CpuDevice {
 public:
  using CpuDevice::CpuDevice;

  bool has_graphs() const override { return true; }
  void record(int32_t key, const std::function<void()>& work) override {
    CHECK(key != 0);
    const auto [place, is_new] = works_.try_emplace(key, work);
    place->second();
    num_replays_ += !is_new;
  }
  ~GraphDevice() override { CHECK(num_replays_ > 20); }

 private:
  std::map<int32_t, std::function<void()>> works_;
  int64_t num_replays_ = 0;
};

struct Outcome {
  std::map<std::pair<RequestId, int32_t>, std::vector<Output>> outputs;
  Statistics statistics;
};

Outcome outcome_of(const std::vector<Arrival>& arrivals, const Options& options,
                   std::unique_ptr<Device> device) {
  auto backend = std::make_unique<ModelBackend>(tiny_model("qwen3"), std::move(device), options);
  const auto core = std::make_unique<Core>(tiny_config("qwen3"), std::move(backend), options);
  std::vector<Output> outputs;
  std::size_t num_arrived = 0;
  for (int32_t step = 0; num_arrived < arrivals.size() || !core->is_idle(); ++step) {
    while (num_arrived < arrivals.size() && arrivals[num_arrived].step <= step) {
      core->add(static_cast<RequestId>(num_arrived), arrivals[num_arrived].request);
      ++num_arrived;
    }
    core->step(&outputs);
  }
  CHECK_EQ(core->cache().num_available(), core->cache().num_pages());
  Outcome outcome;
  for (const Output& output : outputs) {
    outcome.outputs[{output.request, output.sample}].push_back(output);
  }
  outcome.statistics = core->statistics();
  return outcome;
}

bool are_equal(const Output& a, const Output& b) {
  const auto is_equal = [](const TokenLogprob& x, const TokenLogprob& y) {
    return x.token == y.token && x.logprob == y.logprob;
  };
  return a.token == b.token && a.logprob == b.logprob && a.finish == b.finish &&
         std::ranges::equal(a.likeliest, b.likeliest, is_equal);
}

}  // namespace

TEST(outputs_are_those_without_looking_ahead_and_without_graphs) {
  Random random(1);
  int64_t num_stops = 0, num_preemptions = 0, num_reused = 0;
  for (int round = 0; round < 60; ++round) {
    std::vector<Arrival> arrivals;
    for (int32_t i = 0; i < 15; ++i) {
      const int32_t step = (i == 0 ? 0 : arrivals.back().step) + pick(random, 0, 3);
      arrivals.push_back({random_request(random), step});
    }
    Options options;
    options.page_size = pick(random, 1, 6);
    options.num_pages = 80 / options.page_size + pick(random, 2, 30);
    options.max_batch_size = pick(random, 1, 8);
    options.max_step_tokens = options.max_batch_size + pick(random, 0, 20);
    options.batch_invariant = true;  // so that results do not depend on when a token is computed
    options.look_ahead = false;
    const Outcome expected = outcome_of(arrivals, options, std::make_unique<CpuDevice>(options));
    options.look_ahead = true;
    std::unique_ptr<Device> device = std::make_unique<CpuDevice>(options);
    if (round % 2 == 0) device = std::make_unique<GraphDevice>(options);
    const Outcome ahead = outcome_of(arrivals, options, std::move(device));
    CHECK_EQ(expected.outputs.size(), ahead.outputs.size());
    for (const auto& [key, outputs] : expected.outputs) {
      CHECK(std::ranges::equal(outputs, ahead.outputs.at(key), are_equal));
      num_stops += outputs.back().finish == Finish::kStop;
    }
    num_preemptions += ahead.statistics.preemptions;
    num_reused += ahead.statistics.reused_tokens;
  }
  CHECK(num_stops > 100);
  CHECK(num_preemptions > 50);
  CHECK(num_reused > 1000);
}

TEST(a_stop_token_costs_one_step) {
  Options options;
  options.look_ahead = true;
  const auto core = tiny_core("qwen3", options);
  Request request;
  request.prompt = {1, 20, 33};
  request.max_new_tokens = 40;
  request.stop_tokens.resize(97);
  for (int32_t token = 0; token < 97; ++token) {
    request.stop_tokens[static_cast<std::size_t>(token)] = token;
  }
  std::vector<Output> outputs;
  core->add(0, request);
  core->step(&outputs);
  CHECK(outputs.empty());
  core->step(&outputs);
  CHECK_EQ(outputs.size(), 1U);
  CHECK(core->is_idle());
  CHECK_EQ(core->statistics().steps, 2);
  CHECK_EQ(core->statistics().used_pages, 0);
}
