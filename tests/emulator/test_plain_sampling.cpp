// SPDX-License-Identifier: Apache-2.0
// The same as test_sampling.cpp for rows without filters, which have a kernel of their own.
#include <string>
#include <vector>

#include "compare_sampling.h"

namespace flashplan::test {
namespace {

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
