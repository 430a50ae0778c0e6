// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of sample(), run by an emulator of clusters: ids, errors and logprobs must be
// the CPU's.
#include "cuda_builtins.h"
#include "flashplan/sampling.h"
#include "ops/cpu/kernels.h"
#include "ops/operators.h"
// The library has a function of this name, of a build without CUDA or for a real GPU.
#define sample emulated_sample
#include "ops/cuda/sampling.cu"
#undef sample

#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "logit_rows.h"

namespace flashplan::cuda {
namespace {
thread_local float4 memory[simt::kDynamicBytes / sizeof(float4)];
}
}  // namespace flashplan::cuda

namespace flashplan::test {
namespace {

using cpu::SampleResult;

struct Settings {
  const char* name;
  float temperature = 1.0F;
  int32_t top_k = INT32_MAX;
  float top_p = 1.0F;
  float min_p = 0.0F;
  bool has_logprobs = true;
  int64_t seed = 0;  // 0: another one for each call
};

constexpr Settings kSettings[] = {
    {"plain"},
    {"greedy", 0.0F},
    {"cold", 1e-30F},
    {"hot", 1e30F},
    {"k 1", 1.0F, 1},
    {"k 5", 1.0F, 5},
    {"k 50", 1.0F, 50},
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

std::vector<float> probabilities(const std::vector<float>& logits) {
  double largest = -kInfinity;
  for (const float x : logits) largest = std::max<double>(largest, x);
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - largest);
  std::vector<float> result;
  for (const float x : logits) result.push_back(static_cast<float>(std::exp(x - largest) / sum));
  return result;
}

/// Parameters that are tensors, where they are not empty.
struct EachRow {
  std::vector<float> temperatures;
  std::vector<int32_t> top_ks;
};

/// Draws from each row by both engines, a launch for all of them.
void compare(const Rows& all, const Settings& settings, int32_t vocab, bool from_probs = false,
             DType dtype = DType::kFloat32, const float* bias = nullptr, int32_t gap = 0,
             const EachRow& each = {}) {
  const auto num_rows = static_cast<int32_t>(all.rows.size());
  const int64_t stride = vocab + gap;
  const int64_t item = item_size(dtype);
  // On a word of 16 bytes where there is no gap.
  std::vector<float4> memory(static_cast<size_t>(num_rows * stride * item / 16 + 1));
  auto* data = reinterpret_cast<char*>(memory.data());
  for (int32_t r = 0; r < num_rows; ++r) {
    std::vector<float> row = all.rows[static_cast<size_t>(r)];
    if (from_probs && !all.are_probabilities) row = probabilities(row);
    for (int32_t i = 0; i < vocab; ++i) {
      char* to = data + (r * stride + i) * item;
      const float value = row[static_cast<size_t>(i)];
      const uint16_t bits = dtype == DType::kFloat16
                                ? std::bit_cast<uint16_t>(static_cast<_Float16>(value))
                                : __float2bfloat16_rn(value).bits;
      std::memcpy(to, dtype == DType::kFloat32 ? static_cast<const void*>(&value) : &bits,
                  static_cast<size_t>(item));
    }
  }
  std::vector<int32_t> ids(static_cast<size_t>(num_rows), -7);
  std::vector<int32_t> status(static_cast<size_t>(num_rows), -7);
  std::vector<float> logprobs(static_cast<size_t>(num_rows));
  static int64_t seed = 0;
  SampleParams p;
  p.logits = data;
  p.row_stride = stride * item;
  p.bias = bias;
  p.dtype = dtype;
  p.num_rows = num_rows;
  p.vocab = vocab;
  p.from_probs = from_probs;
  p.temperature.all = settings.temperature;
  p.top_k.all = settings.top_k;
  p.top_p.all = settings.top_p;
  p.min_p.all = settings.min_p;
  if (!each.temperatures.empty()) p.temperature.each = each.temperatures.data();
  if (!each.top_ks.empty()) p.top_k.each = each.top_ks.data();
  p.seed.all = settings.seed != 0 ? settings.seed : ++seed;
  p.offset.all = 12345;
  p.ids = ids.data();
  p.logprobs = settings.has_logprobs ? logprobs.data() : nullptr;
  p.status = status.data();
  CHECK(cuda::emulated_sample(p, Device{DeviceType::kCuda, 0}, nullptr).ok());
  for (int32_t r = 0; r < num_rows; ++r) {
    const SampleResult wanted = cpu::baseline::sample_row(p, r);
    const auto row = static_cast<size_t>(r);
    const bool same_logprob =
        !settings.has_logprobs ||
        (wanted.error != SampleError::kNone ? std::isnan(logprobs[row])
                                            : std::fabs(logprobs[row] - wanted.logprob) <= 1e-6F);
    if (ids[row] == wanted.id && status[row] == static_cast<int32_t>(wanted.error) &&
        same_logprob) {
      continue;
    }
    check::fail(__FILE__, __LINE__,
                all.names[row] + ", " + settings.name + ", vocabulary " + std::to_string(vocab) +
                    (from_probs ? ", probabilities" : "") + ", dtype " +
                    std::to_string(static_cast<int>(dtype)) + ": id " + std::to_string(ids[row]) +
                    " status " + std::to_string(status[row]) + " logprob " +
                    std::to_string(logprobs[row]) + ", not id " + std::to_string(wanted.id) +
                    " status " + std::to_string(static_cast<int>(wanted.error)) + " logprob " +
                    std::to_string(wanted.logprob));
  }
}

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
  constexpr float kTopPs[] = {0.4F, 0.7F, 0.9F, 0.999F, 0.99999994F};
  for (const int32_t vocab : {1, 1000, 17'003, 30'011, 65'537}) {
    for (const int num_sms : {4, 132}) {
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
      }
    }
  }
  cuda::emulated_facts.num_sms = 132;
}

/// Rows of the greatest length for which the sum of a bin fits 32 bits even if all elements are in
/// it, and rows of one element more.
TEST(top_p_of_long_rows) {
  cuda::emulated_facts.num_sms = 4;
  constexpr int32_t kMost = cuda::ValueBins::kMostElements;
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
  Rows rows;
  rows.names.emplace_back("equal");
  rows.rows.emplace_back(8, 1.0F);
  for (int draw = 0; draw < 40; ++draw) {
    compare(rows, {"top-p", 1.0F, INT32_MAX, 0.7F, 0.0F, draw % 2 == 0}, 8);
  }
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
    for (const int num_sms : {1, 132}) {
      cuda::emulated_facts.num_sms = num_sms;
      for (const bool has_logprobs : {false, true}) {
        compare(rows, {"top-p", 1.0F, INT32_MAX, 0.41F, 0.0F, has_logprobs, seed}, kVocab);
      }
    }
  }
  cuda::emulated_facts.num_sms = 132;
}

/// A launch for rows without filters, which are in clusters of one to 16 CTAs. With 30 SMs a warp
/// has up to 7 blocks of 128,256 ids.
TEST(plain_rows) {
  constexpr Settings kPlain[] = {
      {"plain"}, {"greedy", 0.0F}, {"cold", 1e-30F}, {"warm", 0.7F}, {"hot", 1e30F}};
  for (const int32_t vocab : {1, 767, 768, 769, 1536, 9216, 9217, 32'000, 128'256}) {
    const Rows rows = block_rows(vocab, static_cast<uint32_t>(vocab));
    for (const int num_sms : {1, 30, 132, 1000}) {
      cuda::emulated_facts.num_sms = num_sms;
      for (const Settings& settings : kPlain) {
        if (vocab == 128'256 && num_sms == 30 && settings.temperature != 1.0F) continue;
        compare(rows, settings, vocab);
        if (settings.temperature == 0.0F || settings.temperature == 1.0F) {
          compare(rows, settings, vocab, true);
        }
      }
    }
  }
  cuda::emulated_facts.num_sms = 132;
}

TEST(plain_rows_of_dtypes_and_biases) {
  constexpr int32_t kVocab = 10'008;
  const Rows rows = block_rows(kVocab, 12);
  std::vector<float> bias;
  for (int32_t i = 0; i < kVocab; ++i) bias.push_back(static_cast<float>(i % 13) * 0.37F);
  for (const int num_sms : {1, 1000}) {
    cuda::emulated_facts.num_sms = num_sms;
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      compare(rows, {"plain"}, kVocab, false, dtype);
      compare(rows, {"plain"}, kVocab, true, dtype);
    }
    compare(rows, {"plain"}, kVocab, false, DType::kFloat32, bias.data());
    compare(rows, {"plain"}, kVocab, false, DType::kFloat32, nullptr, 3);
    compare(rows, {"plain"}, kVocab, true, DType::kFloat32, nullptr, 3);
  }
  cuda::emulated_facts.num_sms = 132;
}

/// With parameters in tensors, rows with and without filters are in one launch.
TEST(plain_rows_beside_others) {
  for (const int num_sms : {4, 132}) {
    for (const int32_t vocab : {5003, 30'008}) {
      cuda::emulated_facts.num_sms = num_sms;
      const Rows rows = block_rows(vocab, 13);
      EachRow each;
      for (size_t r = 0; r < rows.rows.size(); ++r) {
        each.temperatures.push_back(r % 5 == 0 ? 0.0F : 0.5F * static_cast<float>(r % 3 + 1));
        each.top_ks.push_back(r % 2 == 0 ? INT32_MAX : 50);
      }
      compare(rows, {"mixed"}, vocab, false, DType::kFloat32, nullptr, 0, each);
      compare(rows, {"temperatures"}, vocab, false, DType::kFloat32, nullptr, 0,
              {each.temperatures, {}});
      each.temperatures.clear();
      compare(rows, {"mixed"}, vocab, true, DType::kFloat32, nullptr, 0, each);
      each.temperatures.assign(rows.rows.size(), -1.0F);
      compare(rows, {"errors"}, vocab, false, DType::kFloat32, nullptr, 0, each);
    }
  }
  cuda::emulated_facts.num_sms = 132;
}

/// Rows with more blocks than plain_kernel() has entries for: the other kernels draw from them.
TEST(plain_rows_of_many_blocks) {
  constexpr int32_t kVocab = cuda::kMostEntries * sampling::kBlock;
  Rows rows = block_rows(kVocab + 5003, 14);
  compare(rows, {"plain"}, kVocab + 5003);
  compare(rows, {"plain"}, kVocab + 5003, true);
  cuda::emulated_facts.num_sms = 4;
  compare(rows, {"plain"}, kVocab + 5003);
  for (auto& row : rows.rows) row.resize(kVocab);
  compare(rows, {"plain"}, kVocab);
  cuda::emulated_facts.num_sms = 132;
}

/// Probabilities of which one is wrong, or whose sum is.
TEST(plain_rows_of_wrong_probabilities) {
  constexpr int32_t kVocab = 5003;
  constexpr float kFlat = 1.0F / kVocab;
  Rows rows;
  for (const float sum : {0.0F, 0.98F, 0.995F, 1.0F, 1.005F, 1.02F}) {
    rows.names.push_back("sum " + std::to_string(sum));
    rows.rows.emplace_back(kVocab, sum * kFlat);
  }
  for (const float wrong : {-0.0F, -kFlat, 1.02F, kInfinity, std::nanf(""), -std::nanf("")}) {
    rows.names.push_back("one is " + std::to_string(wrong));
    rows.rows.emplace_back(kVocab, kFlat);
    rows.rows.back()[3000] = wrong;
  }
  rows.names.emplace_back("negative and NaN");
  rows.rows.emplace_back(kVocab, kFlat);
  rows.rows.back()[17] = std::nanf("");
  rows.rows.back()[16] = -1.0F;
  rows.names.emplace_back("-0 at the place of the largest");
  rows.rows.emplace_back(kVocab, -0.0F);
  rows.rows.back()[4444] = 1.0F;
  rows.are_probabilities = true;
  compare(rows, {"plain"}, kVocab, true);
  compare(rows, {"greedy", 0.0F}, kVocab, true);
}

}  // namespace
}  // namespace flashplan::test
