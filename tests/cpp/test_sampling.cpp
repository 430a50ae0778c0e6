// SPDX-License-Identifier: Apache-2.0
// sample() and softmax() from C++: the filters against a sort, and what is refused.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "check.h"
#include "flashplan/flashplan.h"
#include "host_tensor.h"
#include "ops/sampling_math.h"
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

TEST(parts_of_a_mass_are_rounded_up) {
  Random random(5);
  for (int round = 0; round < 1000; ++round) {
    const auto total = static_cast<uint64_t>(random.between(1, 1 << 28));
    const auto p = static_cast<float>(random.between(1, 1 << 24)) * 0x1p-24F;
    const double exact = double{p} * static_cast<double>(total);  // 52 bits
    CHECK_EQ(sampling::part_of(p, total), static_cast<uint64_t>(std::ceil(exact)));
  }
}

TEST(blocks_weigh_what_their_elements_do) {
  constexpr auto kCount = static_cast<uint64_t>(sampling::kBlock);
  Random random(7);
  const sampling::Scale logits = sampling::make_scale(3.0F, 0.7F, false);
  const sampling::Scale probs = sampling::absolute_scale();
  for (int round = 0; round < 1000; ++round) {
    const double depth = 1e-3 * random.between(0, 14'000);
    for (const sampling::Scale& row : {logits, probs}) {
      const auto largest = static_cast<float>(row.from_probs ? std::exp(-depth) : 3 - depth);
      const double exact =
          0x1p30 * (row.from_probs ? double{largest} : std::exp((double{largest} - 3) / 0.7F));
      const sampling::Scale block = sampling::scale_of_block(largest, row);
      const uint64_t weight = sampling::weight_in_block(largest, block);
      CHECK(weight >= 1U << 26 && weight <= 1U << 27);
      const uint32_t sum = sampling::rounded_sum(weight * kCount);
      const auto mass = static_cast<double>(sampling::mass_of_block(largest, sum, row));
      CHECK(std::fabs(mass - exact * kCount) <= 1 + 1e-5 * exact * kCount);
    }
  }
  // What is far below weighs nothing, also a block of -inf, whose weights are not defined.
  const float kInfinity = std::numeric_limits<float>::infinity();
  for (const float far : {-kInfinity, -3e38F, -13.0F}) {
    CHECK_EQ(sampling::mass_of_block(far, ~0U, logits), uint64_t{0});
  }
  for (const float far : {0.0F, 1e-45F, 1e-30F, 0x1p-49F}) {
    const sampling::Scale block = sampling::scale_of_block(far, probs);
    CHECK(sampling::weight_in_block(far, block) <= 1U << 27);
    CHECK_EQ(sampling::mass_of_block(far, ~0U, probs), uint64_t{0});
  }
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

TEST(the_largest_probability_passes_every_min_p) {
  Random random(5);
  for (int round = 0; round < 200; ++round) {
    const int64_t vocab = random.between(2, 300);
    HostTensor probs(DType::kFloat32, {1, vocab});
    const double largest = 0.51 + 1e-4 * random.between(0, 4000);
    const double rest = (1 - largest) / static_cast<double>(vocab - 1);
    for (int64_t i = 0; i < vocab; ++i) probs.set({0, i}, i == vocab - 1 ? largest : rest);
    SampleOptions options;
    options.from_probs = true;
    options.min_p = 1.0F;
    HostTensor ids(DType::kInt32, {1});
    CHECK(sample(probs.view(), options, {ids.view(), {}, {}}).ok());
    const auto id = static_cast<int64_t>(ids.bits({0}));
    CHECK_EQ(id, vocab - 1);
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

TEST(drafts_are_verified) {
  Random random(6);
  constexpr int64_t kVocab = 5;
  constexpr int64_t kDrafts = 4;
  for (int round = 0; round < 200; ++round) {
    // The target always takes one token; what drafts it accepts is then no matter of chance.
    HostTensor tokens(DType::kInt32, {1, kDrafts});
    HostTensor draft_probs(DType::kFloat32, {1, kDrafts, kVocab}, 3);
    HostTensor target_probs(DType::kFloat32, {1, kDrafts + 1, kVocab}, 1);
    std::vector<int32_t> wanted;
    bool accepts = true;
    for (int64_t i = 0; i <= kDrafts; ++i) {
      const int64_t best = random.between(0, kVocab - 1);
      for (int64_t t = 0; t < kVocab; ++t) target_probs.set({0, i, t}, t == best ? 1 : 0);
      if (accepts) wanted.push_back(static_cast<int32_t>(best));
      if (i == kDrafts) break;
      const int64_t token = random.one_in(2) ? best : random.between(0, kVocab - 1);
      tokens.set_bits({0, i}, static_cast<uint32_t>(token));
      for (int64_t t = 0; t < kVocab; ++t) draft_probs.set({0, i, t}, 0.2);
      accepts = accepts && token == best;
    }
    HostTensor out(DType::kInt32, {1, kDrafts + 1});
    HostTensor num_accepted(DType::kInt32, {1});
    HostTensor nodes(DType::kInt32, {1, kDrafts});
    Drafts drafts{tokens.view(), draft_probs.view(), target_probs.view(), {}};
    const VerifyOutputs outputs{out.view(), num_accepted.view(), nodes.view(), {}};
    CHECK_EQ(speculative_verify(drafts, {}, outputs).message, std::string());
    const auto count = static_cast<int64_t>(wanted.size()) - 1;
    CHECK_EQ(num_accepted.bits({0}), static_cast<uint32_t>(count));
    for (int64_t i = 0; i <= kDrafts; ++i) {
      const int32_t token = i <= count ? wanted[static_cast<size_t>(i)] : -1;
      CHECK_EQ(static_cast<int32_t>(out.bits({0, i})), token);
      if (i == kDrafts) break;
      CHECK_EQ(static_cast<int32_t>(nodes.bits({0, i})), i < count ? static_cast<int32_t>(i) : -1);
    }
    const std::vector<std::byte> before = out.bytes();
    for (int64_t t = 0; t < kVocab; ++t) target_probs.set({0, 0, t}, t == 0 ? 3 : 0);
    tokens.set_bits({0, 0}, 1);
    draft_probs.set({0, 0, 1}, 1.0);
    check_refused(speculative_verify(drafts, {}, outputs), StatusCode::kInvalidArgument,
                  "target_probs[0, 0]");
    tokens.set_bits({0, 3}, kVocab);
    check_refused(speculative_verify(drafts, {}, outputs), StatusCode::kInvalidArgument,
                  "draft_tokens[0, 3]");
    drafts.parents = num_accepted.view();
    check_refused(speculative_verify(drafts, {}, outputs), StatusCode::kInvalidArgument,
                  "draft_parents");
    CHECK(out.bytes() == before);
  }
}

TEST(penalties_are_subtracted) {
  HostTensor logits(DType::kFloat32, {2, 4}, 3);
  for (int64_t i = 0; i < 8; ++i) logits.set({i / 4, i % 4}, i % 2 == 0 ? 2.0 : -2.0);
  HostTensor history(DType::kInt32, {2, 3});
  const uint32_t tokens[] = {1, 1, 2, 3, 9, 9};
  for (int64_t i = 0; i < 6; ++i) history.set_bits({i / 3, i % 3}, tokens[i]);
  HostTensor presences(DType::kFloat32, {2});
  presences.set({0}, 0.5);
  presences.set({1}, -0.5);
  PenaltyOptions options;
  options.repetition = 2.0F;
  options.presences = presences.view();
  options.frequency = 0.25F;
  const std::vector<std::byte> before = logits.bytes();
  check_refused(apply_penalties(logits.view(), history.view(), int_tensor({3, 2}).view(), options),
                StatusCode::kInvalidArgument, "history[1, 1]");
  check_refused(apply_penalties(logits.view(), history.view(), int_tensor({4, 1}).view(), options),
                StatusCode::kInvalidArgument, "history_lens[0]");
  CHECK(logits.bytes() == before);
  const HostTensor lens = int_tensor({3, 1});
  CHECK_EQ(apply_penalties(logits.view(), history.view(), lens.view(), options).message,
           std::string());
  const double wanted[] = {2, -5, 0.25, -2, 2, -2, 2, -3.75};
  for (int64_t i = 0; i < 8; ++i) CHECK_EQ(logits.get({i / 4, i % 4}), wanted[i]);
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
