// SPDX-License-Identifier: Apache-2.0
// sample() and softmax() from C++: the filters against a sort, and what is refused.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "check.h"
#include "flashplan/flashplan.h"
#include "host_tensor.h"
#include "random_batch.h"
#include "refusal.h"

namespace flashplan::test {
namespace {

HostTensor random_logits(Random& random, DType dtype, int64_t rows, int64_t vocab) {
  HostTensor logits(dtype, {rows, vocab}, random.pick({0, 5}));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < vocab; ++i) {
      // Few values: ties at every threshold.
      logits.set({r, i}, random.pick({0, 1}) != 0 ? random.between(-3, 3) : random_element(random));
    }
  }
  return logits;
}

TEST(filters_keep_what_a_sort_keeps) {
  Random random(3);
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  for (int round = 0; round < 300; ++round) {
    const int64_t rows = random.between(1, 6);
    const int64_t vocab = random.between(1, 3000);
    const HostTensor logits = random_logits(random, kDTypes[round % 3], rows, vocab);
    SampleOptions options;
    options.temperature = 0.9F;
    options.top_k = random.between(1, 100);
    options.top_p = 0.8F;
    options.seed = round;
    HostTensor ids(DType::kInt32, {rows});
    CHECK(sample(logits.view(), options, {ids.view(), {}, {}}).ok());
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<int64_t> order(static_cast<size_t>(vocab));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        return logits.get({r, a}) > logits.get({r, b});
      });
      order.resize(std::min<size_t>(order.size(), static_cast<size_t>(options.top_k)));
      std::vector<double> mass;
      for (const int64_t i : order) {
        mass.push_back(std::exp((logits.get({r, i}) - logits.get({r, order[0]})) / 0.9));
      }
      const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
      double sum = 0;
      size_t kept = 0;
      while (kept < order.size() && sum < 0.8 * total * (1 + 1e-6)) sum += mass[kept++];
      const auto id = static_cast<int64_t>(ids.bits({r}));
      CHECK(std::find(order.begin(), order.begin() + static_cast<int64_t>(kept), id) !=
            order.begin() + static_cast<int64_t>(kept));
    }
  }
}

TEST(softmax_sums_to_one) {
  Random random(4);
  const HostTensor logits = random_logits(random, DType::kBFloat16, 5, 1234);
  HostTensor out(DType::kFloat32, {5, 1234}, 3);
  CHECK(softmax(logits.view(), 0.7F, {}, out.view()).ok());
  for (int64_t r = 0; r < 5; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < 1234; ++i) sum += out.get({r, i});
    CHECK(std::fabs(sum - 1) < 1e-5);
  }
}

TEST(what_is_refused) {
  const auto value = StatusCode::kInvalidArgument;
  const auto type = StatusCode::kInvalidType;
  HostTensor logits(DType::kFloat32, {2, 4});  // NaN
  HostTensor good(DType::kFloat32, {2, 4});
  for (int64_t i = 0; i < 8; ++i) good.set({i / 4, i % 4}, 0.25);
  HostTensor ids(DType::kInt32, {2});
  const std::vector<std::byte> before = ids.bytes();
  const SampleOutputs outputs{ids.view(), {}, {}};
  const auto with = [](auto change) {
    SampleOptions options;
    change(options);
    return options;
  };
  using O = SampleOptions;
  check_refused(sample(logits.view(), {}, outputs), value, "logits[0]");
  check_refused(sample({}, {}, outputs), value, "logits");
  check_refused(sample(good.view(), {}, {good.view(), {}, {}}), type, "out");
  check_refused(sample(good.view(), with([](O& o) { o.top_k = 0; }), outputs), value, "top_k");
  check_refused(sample(good.view(), with([](O& o) { o.top_p = 0; }), outputs), value, "top_p");
  check_refused(sample(good.view(), with([](O& o) { o.min_p = NAN; }), outputs), value, "min_p");
  check_refused(sample(good.view(), with([&](O& o) { o.seeds = ids.view(); }), outputs), type,
                "seed");
  check_refused(sample(good.view(), with([](O& o) { o.temperature = -1; }), outputs), value,
                "temperature");
  check_refused(softmax(good.view(), 0.0F, {}, logits.view()), value, "temperature");
  check_refused(softmax(good.view(), 1.0F, {}, ids.view()), type, "out");
  CHECK(ids.bytes() == before);
  CHECK(sample(good.view(), with([](O& o) { o.from_probs = true; }), outputs).ok());
}

}  // namespace
}  // namespace flashplan::test
