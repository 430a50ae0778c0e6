// SPDX-License-Identifier: Apache-2.0
#include "workload.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <random>
#include <sstream>
#include <stdexcept>

namespace serving {

namespace {

using Random = std::mt19937_64;

struct Lengths {
  double prompt = 0, output = 0;
};

/// A log-normal number with this mean; `sigma` is the deviation of its logarithm.
double log_normal(Random& random, double mean, double sigma) {
  std::lognormal_distribution<double> distribution(std::log(mean) - sigma * sigma / 2, sigma);
  return distribution(random);
}

/// Quantiles of a distribution, of 0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99 and 1.
using Quantiles = std::array<double, 8>;
constexpr Quantiles kParts = {0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1};

constexpr Quantiles kAzurePrompts = {20, 207, 396, 1020, 1189, 2735, 4142, 14050};
constexpr Quantiles kAzureOutputs = {7, 54, 85, 129, 395, 424, 601, 1000};
constexpr Quantiles kMooncakePrompts = {890, 964, 2306, 6909, 15368, 27367, 85401, 126195};
constexpr Quantiles kMooncakeOutputs = {1, 24, 156, 350, 472, 597, 1120, 2000};

/// By the inverse of the distribution, which is linear between the quantiles.
double draw(Random& random, const Quantiles& quantiles) {
  const double part = std::uniform_real_distribution<double>(0, 1)(random);
  std::size_t i = 1;
  while (i + 1 < kParts.size() && part > kParts[i]) ++i;
  const double weight = (part - kParts[i - 1]) / (kParts[i] - kParts[i - 1]);
  return quantiles[i - 1] + weight * (quantiles[i] - quantiles[i - 1]);
}

std::function<Lengths(Random&)> lengths_of(const std::string& name) {
  if (name == "sharegpt") {
    return [](Random& random) {
      return Lengths{log_normal(random, 230, 1.1), log_normal(random, 203, 0.9)};
    };
  }
  if (name == "azure") {
    return [](Random& random) {
      return Lengths{draw(random, kAzurePrompts), draw(random, kAzureOutputs)};
    };
  }
  if (name == "mooncake") {
    return [](Random& random) {
      return Lengths{draw(random, kMooncakePrompts), draw(random, kMooncakeOutputs)};
    };
  }
  std::istringstream parts(name);
  std::string kind;
  int32_t low = 0, high = 0, output = 0;
  char colon = 0;
  std::getline(parts, kind, ':');
  parts >> low >> colon >> high >> colon >> output;
  if (kind != "uniform" || !parts || low < 1 || high < low || output < 1) {
    throw std::invalid_argument(
        "workload: expected sharegpt, azure, mooncake or uniform:LOW:HIGH:OUT, got " + name);
  }
  return [=](Random& random) {
    const int32_t prompt = std::uniform_int_distribution<int32_t>(low, high)(random);
    return Lengths{static_cast<double>(prompt), static_cast<double>(output)};
  };
}

}  // namespace

std::vector<Arrival> make_arrivals(const Workload& workload) {
  const auto lengths = lengths_of(workload.lengths);
  Random random(workload.seed);
  // A Gamma distribution of this shape has the wanted variation; of shape 1 it is exponential.
  const double shape = 1 / (workload.variation * workload.variation);
  std::gamma_distribution<double> gap(shape, 1 / (workload.rate * shape));
  std::vector<Arrival> arrivals;
  double seconds = 0;
  for (int32_t i = 0; i < workload.num_requests; ++i) {
    const Lengths drawn = lengths(random);
    const auto tokens = [](double length, int32_t most) {
      return static_cast<int32_t>(std::clamp<double>(std::round(length), 1, most));
    };
    Arrival arrival;
    arrival.seconds = seconds;
    arrival.output_tokens = tokens(drawn.output, workload.max_tokens / 2);
    arrival.prompt_tokens = tokens(drawn.prompt, workload.max_tokens - arrival.output_tokens);
    arrivals.push_back(arrival);
    seconds += gap(random);
  }
  return arrivals;
}

}  // namespace serving
