// SPDX-License-Identifier: Apache-2.0
// Draws: seeds, filters, penalties and log-probabilities of requests in one batch.
#include <algorithm>
#include <cmath>
#include <set>

#include "check.h"
#include "dense_model.h"
#include "drive.h"

using namespace engine;

namespace {

Options some_options() {
  Options options;
  options.page_size = 4;
  options.num_pages = 200;
  options.max_batch_size = 16;
  options.max_step_tokens = 40;
  return options;
}

Request some_request() {
  Request request;
  request.prompt = {1, 20, 33, 7, 50};
  request.max_new_tokens = 30;
  request.ignore_model_stops = true;
  return request;
}

std::vector<int32_t> text_of(const Request& request) {
  return serve(*tiny_core("qwen3", some_options()), {{request, 0}}).at({0, 0});
}

}  // namespace

TEST(samples_depend_on_their_seed_alone) {
  Request request = some_request();
  request.sampling.temperature = 1.0F;
  request.sampling.seed = 5;
  request.num_samples = 4;
  const Texts texts = serve(*tiny_core("qwen3", some_options()), {{request, 0}});
  std::set<std::vector<int32_t>> different;
  for (int32_t i = 0; i < 4; ++i) {
    different.insert(texts.at({0, i}));
    // Sample i has seed 5 + i, also as a request of its own among others and with preemptions.
    Request one = request;
    one.num_samples = 1;
    one.sampling.seed = 5 + i;
    const auto core = tiny_core("qwen3", some_options());
    const auto preempt = [&](int32_t step) {
      if (step % 3 == 2 && core->scheduler().num_running() > 1)
        core->scheduler().preempt_youngest();
    };
    Request other = one;
    other.sampling.seed = 99;
    other.prompt = {4, 8, 15, 16, 23, 42};
    const Texts again = serve(*core, {{other, 0}, {one, 2}, {other, 3}}, preempt);
    CHECK(again.at({1, 0}) == texts.at({0, i}));
    CHECK(again.at({0, 0}) == again.at({2, 0}));
    CHECK(core->statistics().preemptions > 5);
  }
  CHECK_EQ(different.size(), 4U);
}

TEST(filters_of_one_request_do_not_change_others) {
  const std::vector<int32_t> greedy = text_of(some_request());
  std::vector<Arrival> arrivals;
  for (int kind = 0; kind < 5; ++kind) {
    Request request = some_request();
    request.sampling.temperature = kind == 0 ? 0.0F : 1.5F;
    if (kind == 1) request.sampling.top_k = 1;
    if (kind == 2) request.sampling.top_p = 1e-6F;
    if (kind == 3) request.sampling.min_p = 1.0F;
    arrivals.push_back({request, 0});
  }
  const Texts texts = serve(*tiny_core("qwen3", some_options()), arrivals);
  for (RequestId id = 0; id < 4; ++id) CHECK(texts.at({id, 0}) == greedy);
  CHECK(texts.at({4, 0}) != greedy);
}

TEST(log_probabilities) {
  Request request = some_request();
  request.sampling.temperature = 0.7F;
  const auto core = tiny_core("qwen3", some_options());
  core->add(0, request);
  std::vector<Output> outputs;
  while (!core->is_idle()) core->step(&outputs);
  std::vector<int32_t> text = request.prompt;
  for (const Output& output : outputs) text.push_back(output.token);
  const auto logits = DenseModel(tiny_model("qwen3")).logits(text);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& row = logits[request.prompt.size() + i - 1];
    double sum = 0;
    for (const double logit : row) sum += std::exp(logit / 0.7);
    const double expected = row[static_cast<std::size_t>(outputs[i].token)] / 0.7 - std::log(sum);
    CHECK(std::abs(double{outputs[i].logprob} - expected) < 1e-3);
  }
}

TEST(penalties_count_what_they_say) {
  // The most likely token after penalties, of the dense model's logits.
  const DenseModel dense(tiny_model("qwen3"));
  for (int kind = 0; kind < 3; ++kind) {
    Request request = some_request();
    Sampling& sampling = request.sampling;
    if (kind == 0) sampling.repetition = 1.8F;
    if (kind == 1) sampling.presence = 3.0F;
    if (kind == 2) sampling.frequency = 1.5F;
    // Beside a request without penalties.
    const Texts texts =
        serve(*tiny_core("qwen3", some_options()), {{some_request(), 0}, {request, 0}});
    CHECK(texts.at({0, 0}) == text_of(some_request()));
    const std::vector<int32_t>& text = texts.at({1, 0});
    CHECK(text != texts.at({0, 0}));
    const auto logits = dense.logits(text);
    for (std::size_t i = request.prompt.size(); i < text.size(); ++i) {
      auto row = logits[i - 1];
      for (int32_t token = 0; token < 97; ++token) {
        double& logit = row[static_cast<std::size_t>(token)];
        const auto begin = text.begin();
        const auto now = begin + static_cast<std::ptrdiff_t>(i);
        const auto first = begin + static_cast<std::ptrdiff_t>(request.prompt.size());
        const auto num_new = static_cast<double>(std::count(first, now, token));
        const double repetition = double{sampling.repetition};
        if (std::find(begin, now, token) != now) {
          logit = logit > 0 ? logit / repetition : logit * repetition;
        }
        logit -= double{sampling.frequency} * num_new;
        if (num_new > 0) logit -= double{sampling.presence};
      }
      const double best = *std::ranges::max_element(row);
      CHECK(row[static_cast<std::size_t>(text[i])] >= best - 1e-3);
    }
  }
}
