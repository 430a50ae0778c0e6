// SPDX-License-Identifier: Apache-2.0
// Draws: seeds, filters, penalties and log-probabilities of requests in one batch.
#include <algorithm>
#include <cmath>
#include <functional>
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

std::vector<double> penalized(std::vector<double> logits, const std::vector<int32_t>& before,
                              std::size_t num_prompt_tokens, const Sampling& sampling) {
  for (std::size_t token = 0; token < logits.size(); ++token) {
    double& logit = logits[token];
    const auto new_tokens = before.begin() + static_cast<std::ptrdiff_t>(num_prompt_tokens);
    const auto id = static_cast<int32_t>(token);
    const auto num_new = static_cast<double>(std::count(new_tokens, before.end(), id));
    const double repetition = double{sampling.repetition};
    if (std::ranges::find(before, id) != before.end()) {
      logit = logit > 0 ? logit / repetition : logit * repetition;
    }
    logit -= double{sampling.frequency} * num_new;
    if (num_new > 0) logit -= double{sampling.presence};
  }
  return logits;
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

TEST(draws_differ_from_token_to_token) {
  Request request = some_request();
  request.sampling.temperature = 1e6F;  // all tokens are equally likely
  const std::vector<int32_t> text = text_of(request);
  CHECK(std::set(text.begin() + 5, text.end()).size() > 15);
}

TEST(log_probabilities_with_penalties) {
  const DenseModel dense(tiny_model("qwen3"));
  std::vector<Arrival> arrivals(5, {some_request(), 0});
  for (Arrival& arrival : arrivals) arrival.request.sampling.temperature = 0.7F;
  arrivals[1].request.sampling.repetition = 1.8F;
  arrivals[2].request.sampling.presence = 3.0F;
  arrivals[3].request.sampling.frequency = 1.5F;
  arrivals[4].request.sampling = {0.7F, 20, 0.9F, 0.01F, 0, 0.6F, -1.0F, 0.5F};
  for (int32_t i = 0; i < 5; ++i)
    arrivals[static_cast<std::size_t>(i)].request.num_logprobs = 5 * i;
  const auto core = tiny_core("qwen3", some_options());
  std::vector<Output> outputs;
  for (std::size_t i = 0; i < arrivals.size(); ++i) {
    core->add(static_cast<RequestId>(i), arrivals[i].request);
  }
  while (!core->is_idle()) core->step(&outputs);
  for (std::size_t request = 0; request < arrivals.size(); ++request) {
    std::vector<int32_t> text = arrivals[request].request.prompt;
    std::vector<Output> mine;
    for (const Output& output : outputs) {
      if (output.request != static_cast<RequestId>(request)) continue;
      text.push_back(output.token);
      mine.push_back(output);
    }
    CHECK_EQ(mine.size(), 30U);
    const std::size_t num_prompt_tokens = text.size() - mine.size();
    const auto logits = dense.logits(text);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const std::size_t position = num_prompt_tokens + i;
      const std::vector<int32_t> before(text.begin(),
                                        text.begin() + static_cast<std::ptrdiff_t>(position));
      const std::vector<double> row = penalized(logits[position - 1], before, num_prompt_tokens,
                                                arrivals[request].request.sampling);
      double sum = 0;
      for (const double logit : row) sum += std::exp(logit);
      const auto expected = [&](int32_t token) {
        return row[static_cast<std::size_t>(token)] - std::log(sum);
      };
      CHECK(std::abs(double{mine[i].logprob} - expected(text[position])) < 1e-3);
      // The likeliest tokens, however they are ordered if nearly equal.
      std::vector<double> sorted = row;
      std::ranges::sort(sorted, std::greater<>());
      CHECK_EQ(mine[i].likeliest.size(), 5 * request);
      std::set<int32_t> tokens;
      for (std::size_t rank = 0; rank < mine[i].likeliest.size(); ++rank) {
        const auto [token, logprob] = mine[i].likeliest[rank];
        tokens.insert(token);
        CHECK(std::abs(double{logprob} - expected(token)) < 1e-3);
        CHECK(std::abs(double{logprob} - (sorted[rank] - std::log(sum))) < 1e-3);
      }
      CHECK_EQ(tokens.size(), mine[i].likeliest.size());
    }
  }
}
