// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of sample(), run by an emulator of clusters: ids, errors and logprobs must be
// the CPU's.
#include <array>
#include <random>
#include <vector>

#include "compare_sampling.h"

namespace flashplan::test {
namespace {

constexpr Settings kSettings[] = {
    {"plain"},
    {"greedy", 0.0F},
    {"cold", 1e-30F},
    {"hot", 1e30F},
    {"k 1", 1.0F, 1},
    {"k 5", 1.0F, 5},
    {"k 50", 1.0F, 50},
    {"k 100", 1.0F, 100},
    {"k 300", 1.0F, 300},
    {"k 5000 hot", 1e30F, 5000},
    {"k 50 hot", 1e30F, 50},
    {"p tiny", 1.0F, INT32_MAX, 1e-45F},
    {"p 0.3", 1.0F, INT32_MAX, 0.3F},
    {"p 0.9", 1.0F, INT32_MAX, 0.9F},
    {"p 0.999", 0.7F, INT32_MAX, 0.999F},
    {"p almost 1", 1.0F, INT32_MAX, 0.99999994F},
    {"k 50 p 0.9", 1.0F, 50, 0.9F},
    {"k 3000 p 0.9", 1.0F, 3000, 0.9F},
    {"min-p 1", 1.0F, INT32_MAX, 1.0F, 1.0F},
    {"min-p 0.1", 1.0F, INT32_MAX, 1.0F, 0.1F},
    {"all", 0.8F, 50, 0.95F, 0.01F},
    {"all large", 1.3F, 2000, 0.8F, 1e-3F},
};

// For what does not depend on the filters.
constexpr Settings kFewSettings[] = {
    {"plain"},
    {"k 50", 1.0F, 50},
    {"p 0.9", 1.0F, INT32_MAX, 0.9F},
    {"k 3000 p 0.9", 1.0F, 3000, 0.9F},
    {"min-p 1", 1.0F, INT32_MAX, 1.0F, 1.0F},
};

/// The exponential is as near as the comment of weight_at() says.
TEST(weights_of_distances) {
  CHECK(sampling::weight_at(0.0F) == sampling::kOne);
  CHECK(sampling::weight_at(1.0F) == 0);
  std::mt19937 random(std::random_device{}());
  std::uniform_real_distribution<float> distance;
  for (int i = 0; i < 1'000'000; ++i) {
    const float d = distance(random);
    const double exact = std::exp2(30 - 32 * double{d});
    CHECK(std::fabs(sampling::weight_at(d) - exact) <= 0.5 + 2e-7 * exact);
  }
}

TEST(rows_of_one_cta) {
  for (const int32_t vocab : {1, 7, 1000, 5003}) {
    const Rows rows = hard_rows(vocab, static_cast<uint32_t>(vocab));
    for (const Settings& settings : kSettings) compare(rows, settings, vocab);
  }
}

TEST(rows_of_clusters) {
  const Rows rows = hard_rows(17'003, 3);
  for (const Settings& settings : kSettings) compare(rows, settings, 17'003);
}

TEST(rows_of_a_vocabulary) {
  const Rows rows = hard_rows(128'256, 1);
  for (const Settings& settings : kFewSettings) compare(rows, settings, 128'256);
}

Rows first_rows(Rows rows, size_t count) {
  rows.names.resize(count);
  rows.rows.resize(count);
  return rows;
}

/// Each of many rows gets as few CTAs as can hold it, for most of the settings: two and sixteen.
TEST(many_rows_of_clusters) {
  cuda::emulated_facts.num_sms = 5;
  for (const int32_t vocab : {40'008, 200'008}) {
    const Rows rows = first_rows(hard_rows(vocab, 11), 4);
    for (const Settings& settings : kFewSettings) compare(rows, settings, vocab);
  }
  cuda::emulated_facts.num_sms = 132;
}

TEST(probabilities) {
  const Rows rows = hard_rows(9001, 4);
  for (const Settings& settings : kSettings) compare(rows, settings, 9001, true);
}

TEST(dtypes_and_biases) {
  constexpr int32_t kVocab = 10'008;
  const Rows rows = hard_rows(kVocab, 5);
  std::vector<float> bias;
  for (int32_t i = 0; i < kVocab; ++i) bias.push_back(static_cast<float>(i % 13) * 0.37F);
  for (const Settings& settings : kFewSettings) {
    compare(rows, settings, kVocab, false, DType::kFloat16);
    compare(rows, settings, kVocab, false, DType::kBFloat16);
    compare(rows, settings, kVocab, false, DType::kFloat32, bias.data());
    compare(rows, settings, kVocab, false, DType::kFloat32, nullptr, 3);
  }
}

/// A GPU below compute capability 9.0 has no clusters: one CTA processes a row, and reads it
/// several times because its shared memory does not hold it.
TEST(rows_that_are_not_held) {
  cuda::emulated_facts.major = 8;
  const Rows rows = hard_rows(20'003, 6);
  for (const Settings& settings : kSettings) compare(rows, settings, 20'003);
  cuda::emulated_facts.major = 9;
}

/// From compute capability 12.0 on, a CTA has less shared memory, and clusters have 8 CTAs at most.
TEST(gpus_with_less_shared_memory) {
  cuda::emulated_facts.major = 12;
  for (const int32_t num_sms : {5, 132}) {
    cuda::emulated_facts.num_sms = num_sms;
    for (const int32_t vocab : {24'000, 128'256, 200'003}) {
      const Rows rows = first_rows(hard_rows(vocab, 12), 2);
      for (const Settings& settings : kFewSettings) compare(rows, settings, vocab);
    }
  }
  cuda::emulated_facts.num_sms = 132;
  cuda::emulated_facts.major = 9;
}

/// With at least one row per SM, one CTA reads each row and does not hold it in shared memory.
TEST(rows_that_are_streamed) {
  cuda::emulated_facts.num_sms = 4;
  for (const int32_t vocab : {24'577, 40'003}) {
    const Rows rows = hard_rows(vocab, 7);
    for (const Settings& settings : kSettings) compare(rows, settings, vocab);
  }
  const Rows rows = hard_rows(30'008, 8);
  std::vector<float> bias;
  for (int32_t i = 0; i < 30'008; ++i) bias.push_back(static_cast<float>(i % 13) * 0.37F);
  for (const Settings& settings : kFewSettings) {
    compare(rows, settings, 30'008, false, DType::kFloat16);
    compare(rows, settings, 30'008, false, DType::kBFloat16);
    compare(rows, settings, 30'008, false, DType::kFloat32, bias.data());
    compare(rows, settings, 30'008, false, DType::kFloat32, nullptr, 3);
  }
  cuda::emulated_facts.num_sms = 132;
}

/// Top-p alone: tokens are drawn as if there were no filter, until top-p keeps one. Without
/// logprobs a CTA that streams a row need not find out what is kept.
TEST(rows_with_top_p) {
  constexpr float kTopPs[] = {0.01F, 0.2F, 0.4F, 0.7F, 0.9F, 0.999F, 0.99999994F};
  for (const int32_t vocab : {1, 1000, 17'003, 30'011, 65'545}) {
    for (const int num_sms : {4, 92}) {
      cuda::emulated_facts.num_sms = num_sms;
      const Rows rows = block_rows(vocab, static_cast<uint32_t>(vocab));
      EachRow each;
      for (size_t r = 0; r < rows.rows.size(); ++r) {
        each.temperatures.push_back(r % 3 == 0 ? 0.0F : 0.7F);
      }
      for (const float top_p : kTopPs) {
        compare(rows, {"temperatures", 1.0F, INT32_MAX, top_p, 0.0F, false}, vocab, false,
                DType::kFloat32, nullptr, 0, each);
        compare(rows, {"greedy", 0.0F, INT32_MAX, top_p, 0.0F, false}, vocab);
        compare(rows, {"top-p", 1.0F, INT32_MAX, top_p, 0.0F, false}, vocab);
        compare(rows, {"top-p", 0.6F, INT32_MAX, top_p, 0.0F, false}, vocab);
        compare(rows, {"logprobs", 1.0F, INT32_MAX, top_p}, vocab);
        compare(rows, {"top-p", 1.0F, INT32_MAX, top_p, 0.0F, false}, vocab, true);
        compare(rows, {"logprobs", 1.0F, INT32_MAX, top_p}, vocab, true);
      }
      for (size_t r = 0; r < rows.rows.size(); ++r) {
        each.top_ps.push_back(std::array{0.9F, 1.0F, 0.1F, 1e-3F}[r % 4]);
      }
      for (const bool has_logprobs : {false, true}) {
        const Settings arrays = {"arrays", 1.0F, INT32_MAX, 1.0F, 0.0F, has_logprobs};
        compare(rows, arrays, vocab, false, DType::kFloat32, nullptr, 0, each);
        compare(rows, arrays, vocab, false, DType::kBFloat16, nullptr, 0, each);
        each.temperatures.clear();
        compare(rows, arrays, vocab, true, DType::kFloat32, nullptr, 0, each);
      }
    }
  }
  cuda::emulated_facts.num_sms = 132;
}

/// One CTA finds a threshold wherever it is: below the bins, which begin at the first elements of a
/// row; above them, among more elements than a warp has lanes; and among so many that the list of
/// those near it does not hold them, whether these are equal or not.
TEST(thresholds_outside_of_bins_and_lists) {
  constexpr int32_t kVocab = 128'256;
  Rows rows;
  std::mt19937 random(20);
  std::normal_distribution<float> normal;
  const auto add = [&](const char* name, auto value) -> std::vector<float>& {
    rows.names.emplace_back(name);
    rows.rows.emplace_back();
    for (int32_t i = 0; i < kVocab; ++i) rows.rows.back().push_back(value(i));
    return rows.rows.back();
  };
  add("below the bins", [&](int) { return 3.0F * normal(random); })[5] = 16.0F;
  std::vector<float>& above = add("above the bins", [&](int) { return normal(random); });
  for (size_t i = 0; i < 150; ++i) above[20'000 + i * 700] = 12.0F + static_cast<float>(i) * 0.001F;
  add("many near it", [&](int) { return 5.0F + 0.002F * normal(random); });
  add("two values", [&](int i) { return i % 3 == 0 ? 0x1.000002p0F : 1.0F; });
  add("peaked", [&](int) { return 16.0F * normal(random); });
  add("masked at first", [&](int i) { return i < 20'000 ? -kInfinity : 20 + 3 * normal(random); });
  cuda::emulated_facts.num_sms = 4;
  EachRow each;
  each.temperatures.assign(rows.rows.size(), 1.1F);
  for (const auto& top_ps :
       {std::array{0.9988F, 0.7F}, {0.41F, 0.99F}, {0.3F, 0.2F}, {0.009F, 0.005F}}) {
    each.top_ps.clear();
    for (size_t r = 0; r < rows.rows.size(); ++r) each.top_ps.push_back(top_ps[r % 2]);
    compare(rows, {"logprobs"}, kVocab, false, DType::kFloat32, nullptr, 0, each);
    compare(rows, {"no logprobs", 1.0F, INT32_MAX, 1.0F, 0.0F, false}, kVocab, false,
            DType::kFloat32, nullptr, 0, each);
  }
  for (const int32_t top_k : {1000, 100'000}) compare(rows, {"top-k", 1.0F, top_k}, kVocab);
  cuda::emulated_facts.num_sms = 132;
}

/// Top-p counts what top-k and min-p drop, too.
TEST(joint_filters) {
  constexpr Settings kJoint[] = {
      {"k 50 p 0.9 joint", 1.0F, 50, 0.9F, 0.0F, true, 0, true},
      {"k 3000 p 0.5 joint", 1.0F, 3000, 0.5F, 0.0F, true, 0, true},
      {"k 3 p 0.999 joint", 1.5F, 3, 0.999F, 0.0F, true, 0, true},
      {"p 0.9 min-p 0.1 joint", 1.0F, INT32_MAX, 0.9F, 0.1F, true, 0, true},
      {"all joint", 0.8F, 500, 0.95F, 1e-3F, true, 0, true},
  };
  for (const int32_t vocab : {7, 5003, 17'003}) {
    const Rows rows = hard_rows(vocab, static_cast<uint32_t>(vocab));
    EachRow each;
    for (size_t r = 0; r < rows.rows.size(); ++r) each.top_ps.push_back(r % 2 == 0 ? 1.0F : 0.6F);
    for (const Settings& settings : kJoint) {
      compare(rows, settings, vocab);
      compare(rows, settings, vocab, true);
      compare(rows, settings, vocab, false, DType::kFloat32, nullptr, 0, each);
    }
  }
  cuda::emulated_facts.num_sms = 4;
  const Rows rows = hard_rows(24'577, 9);
  for (const Settings& settings : kJoint) compare(rows, settings, 24'577);
  cuda::emulated_facts.num_sms = 132;
}

/// Requests draw from any rows of the logits; some name none.
TEST(chosen_rows) {
  for (const int num_sms : {4, 132}) {
    cuda::emulated_facts.num_sms = num_sms;
    const Rows rows = hard_rows(24'577, 10);
    const auto num_rows = static_cast<int32_t>(rows.rows.size());
    EachRow each;
    for (int32_t r = 0; r < num_rows; ++r) each.rows.push_back((r * 5 + 3) % num_rows);
    each.rows[2] = -1;
    each.rows[5] = num_rows;
    for (const Settings& settings : kFewSettings) {
      compare(rows, settings, 24'577, false, DType::kFloat32, nullptr, 0, each);
    }
    compare(rows, {"p 0.9", 1.0F, INT32_MAX, 0.9F, 0.0F, false}, 24'577, false, DType::kFloat32,
            nullptr, 0, each);
  }
  cuda::emulated_facts.num_sms = 132;
}

/// Rows of the greatest length for which the sum of a bin fits 32 bits even if all elements are in
/// it, and rows of one element more.
TEST(top_p_of_long_rows) {
  cuda::emulated_facts.num_sms = 4;
  constexpr int32_t kMost = cuda::ValueBins<false>::kMostElements;
  for (const int32_t vocab : {kMost, kMost + 1}) {
    const Rows rows = hard_rows(vocab, 15);
    for (int times = 0; times < 4; ++times) {
      compare(rows, {"top-p", 1.0F, INT32_MAX, 0.4F, 0.0F, false}, vocab);
    }
  }
  cuda::emulated_facts.num_sms = 132;
}

/// Of eight equal elements, top-p 0.7 keeps the first six, so that the last word of four is
/// divided.
TEST(top_p_of_equal_elements) {
  cuda::emulated_facts.num_sms = 1;  // counted_kernel() draws from the longer row
  for (const int32_t vocab : {8, 30'011}) {
    Rows rows;
    rows.names.emplace_back("equal");
    rows.rows.emplace_back(8, 1.0F);
    rows.rows[0].resize(static_cast<size_t>(vocab), -kInfinity);
    for (int draw = 0; draw < 40; ++draw) {
      compare(rows, {"top-p", 1.0F, INT32_MAX, 0.7F, 0.0F, draw % 2 == 0}, vocab);
    }
  }
  cuda::emulated_facts.num_sms = 132;
}

/// All elements are in one bin, which a thread adds up for its warp. Top-p 0.4 drops most tries,
/// and only the ids tell which.
TEST(top_p_of_flat_rows) {
  constexpr int32_t kVocab = 65'536;
  cuda::emulated_facts.num_sms = 4;
  Rows rows;
  for (int r = 0; r < 8; ++r) {
    rows.names.emplace_back("flat");
    rows.rows.emplace_back(kVocab, 0.0F);
  }
  for (const bool from_probs : {false, true}) {
    compare(rows, {"top-p", 1.0F, INT32_MAX, 0.4F, 0.0F, false}, kVocab, from_probs);
    compare(rows, {"logprobs", 1.0F, INT32_MAX, 0.4F}, kVocab, from_probs);
  }
  cuda::emulated_facts.num_sms = 132;
}

/// Top-p 0.41 keeps only the first of three tokens, whose probability is 0.415. The seeds are
/// chosen so that every try draws another one.
TEST(dropped_tries) {
  constexpr int32_t kVocab = 30'011;
  Rows rows;
  rows.names.emplace_back("three tokens");
  rows.rows.emplace_back(kVocab, -kInfinity);
  rows.rows[0][800] = 0.35F;
  rows.rows[0][12'000] = rows.rows[0][23'000] = 0.0F;
  const auto is_dropped = [](int64_t seed) {
    for (uint32_t t = 0; t < sampling::kMostTries; ++t) {
      const auto random = sampling::random_pair(seed, 12345, 0, sampling::use_of_try(t));
      if (static_cast<double>(random.first) < 0.42 * 0x1p64) return false;
    }
    return true;
  };
  int64_t seed = 1;
  for (int found = 0; found < 3; ++seed) {
    if (!is_dropped(seed)) continue;
    ++found;
    for (const int num_sms : {1, 3, 132}) {
      cuda::emulated_facts.num_sms = num_sms;
      for (const bool has_logprobs : {false, true}) {
        compare(rows, {"top-p", 1.0F, INT32_MAX, 0.41F, 0.0F, has_logprobs, seed}, kVocab);
      }
    }
  }
  cuda::emulated_facts.num_sms = 132;
}

}  // namespace
}  // namespace flashplan::test
