// SPDX-License-Identifier: Apache-2.0
// Lengths and arrivals have the means and quantiles that they claim to have.
#include "workload.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "check.h"
#include "report.h"
#include "run.h"

using namespace serving;

namespace {

std::vector<Arrival> many(const std::string& lengths, double variation = 1) {
  Workload workload;
  workload.lengths = lengths;
  workload.rate = 5;
  workload.variation = variation;
  workload.num_requests = 200000;
  workload.max_tokens = 1 << 20;
  return make_arrivals(workload);
}

std::vector<double> prompts_of(const std::vector<Arrival>& arrivals) {
  std::vector<double> lengths;
  for (const Arrival& arrival : arrivals) lengths.push_back(arrival.prompt_tokens);
  return lengths;
}

std::vector<double> outputs_of(const std::vector<Arrival>& arrivals) {
  std::vector<double> lengths;
  for (const Arrival& arrival : arrivals) lengths.push_back(arrival.output_tokens);
  return lengths;
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

bool is_near(double value, double expected) { return std::abs(value - expected) < 0.02 * expected; }

}  // namespace

TEST(lengths) {
  const auto sharegpt = many("sharegpt");
  CHECK(is_near(mean(prompts_of(sharegpt)), 230));
  CHECK(is_near(mean(outputs_of(sharegpt)), 203));
  const auto azure = many("azure");
  CHECK(is_near(quantile(prompts_of(azure), 0.25), 396));
  CHECK(is_near(quantile(prompts_of(azure), 0.9), 2735));
  CHECK(is_near(quantile(outputs_of(azure), 0.5), 129));
  const auto mooncake = many("mooncake");
  CHECK(is_near(quantile(prompts_of(mooncake), 0.5), 6909));
  CHECK(is_near(quantile(outputs_of(mooncake), 0.75), 472));
  const auto uniform = prompts_of(many("uniform:512:2048:256"));
  CHECK(*std::ranges::min_element(uniform) == 512);
  CHECK(*std::ranges::max_element(uniform) == 2048);
  CHECK(is_near(mean(uniform), 1280));
}

TEST(gaps) {
  for (const double variation : {1.0, 2.0}) {
    const auto arrivals = many("uniform:1:2:1", variation);
    std::vector<double> gaps, squares;
    for (std::size_t i = 1; i < arrivals.size(); ++i) {
      gaps.push_back(arrivals[i].seconds - arrivals[i - 1].seconds);
      squares.push_back(gaps.back() * gaps.back());
    }
    const double average = mean(gaps);
    CHECK(is_near(average, 0.2));
    CHECK(is_near(std::sqrt(mean(squares) - average * average) / average, variation));
  }
}

TEST(limits) {
  Workload workload;
  workload.lengths = "mooncake";
  workload.max_tokens = 4096;
  for (const Arrival& arrival : make_arrivals(workload)) {
    CHECK(arrival.prompt_tokens >= 1 && arrival.output_tokens >= 1);
    CHECK(arrival.prompt_tokens + arrival.output_tokens <= 4096);
  }
}

TEST(unknown_workloads) {
  for (const char* name : {"shared", "uniform:5:2:1", "uniform:5:8", "uniform:0:8:1"}) {
    std::string message;
    try {
      many(name);
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    CHECK_EQ(message, "workload: expected sharegpt, azure, mooncake or uniform:LOW:HIGH:OUT, got " +
                          std::string(name));
  }
}

TEST(requests_that_can_not_be_served_end_a_run) {
  const std::string folder = std::string(SERVING_MODELS) + "/tiny";
  engine::Options options;
  options.num_pages = 50;  // of 16 tokens; the first request, which warms up, has 608
  const auto engine = engine::Engine::random(folder, 1, options);
  const int32_t vocab = engine::read_model_config(folder).vocab;
  const Measured measured = run_load(*engine, {{0, 20, 4}, {0, 30, 5}}, vocab, 2, 1);
  CHECK_EQ(measured.output_tokens, 18);
  CHECK_EQ(measured.first_token_ms.size(), 1U);
  CHECK_EQ(measured.token_gap_ms.size(), 8U);
  std::string message;
  try {
    run_load(*engine, {{0, 20, 4}, {0, 800, 5}}, vocab, 1, 0);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK_EQ(message, "max_new_tokens: expected tokens that fit the cache of 800, got 805");
}

TEST(quantiles) {
  CHECK(quantile({3, 1, 2}, 0.5) == 2);
  CHECK(quantile({1, 2}, 0.25) == 1.25);
  CHECK(quantile({7}, 0.99) == 7);
  CHECK(std::isnan(quantile({}, 0.5)));
}
