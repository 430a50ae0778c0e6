// SPDX-License-Identifier: Apache-2.0
// The sm80 kernels' decodes, most of them over short rows (FewRows), run by the emulator, against
// double arithmetic: in pairs of kv heads, whole and cut, of tensors that are aligned or not, of
// requests that are shorter than planned, merged by whichever CTA comes last.
#include <algorithm>
#include <string>
#include <vector>

#include "check.h"
#include "decode_batch.h"

namespace flashplan::test {
namespace {

template <typename Choices, int32_t kDims>
void check(const Decodes& decodes, const std::string& what, float q_gain = 1.0F) {
  DecodeBatch<Choices, kDims> batch(decodes, true, q_gain);
  const std::vector<float> results = batch.run();
  expect_error_below(0.02, batch.error(), what);
  DecodeBatch<Choices, kDims> unaligned(decodes, false, q_gain);
  expect_equal_bits(unaligned.run(), results, what + ": other bits if not aligned");
  std::vector<int32_t> order = in_order(decodes.num_ctas);
  for (int i = 0; i < 3; ++i) {
    std::rotate(order.begin(), order.begin() + 1 + i % decodes.num_ctas % 2, order.end());
    if (i == 2) std::reverse(order.begin(), order.end());
    expect_equal_bits(batch.run(order), results, what + ": other bits in another order");
  }
}

template <typename Choices, int32_t kDims>
void check_all() {
  check<Choices, kDims>({.kv_lens = {300, 70, 1, 64, 0, 129}, .num_kv_heads = 4, .num_ctas = 3},
                        "pairs");
  check<Choices, kDims>({.kv_lens = {500, 90, 700},
                         .num_kv_heads = 3,
                         .group_size = 4,
                         .page_size = 1,
                         .num_ctas = 4},
                        "a head left over");
  check<Choices, kDims>({.kv_lens = {900, 33},
                         .num_kv_heads = 2,
                         .group_size = 2,
                         .qo_len = 3,
                         .page_size = 0,
                         .num_ctas = 3,
                         .window_left = 400},
                        "drafts with a window");
  check<Choices, kDims>({.kv_lens = {1400}, .num_kv_heads = 1, .group_size = 8, .num_ctas = 5},
                        "some states");
  check<Choices, kDims>({.kv_lens = {9200}, .num_kv_heads = 1, .group_size = 2, .num_ctas = 36},
                        "more states than lanes");
  check<Choices, kDims>(
      {.kv_lens = {600, 90}, .num_kv_heads = 2, .group_size = 3, .num_ctas = 2, .sharpness = 12.0F},
      "logits that grow");
  check<Choices, kDims>(
      {.kv_lens = {100, 700, 0}, .num_kv_heads = 4, .num_ctas = 7, .planned_lens = {1500, 900, 40}},
      "shorter than planned");
  check<Choices, kDims>(
      {.kv_lens = {330}, .num_kv_heads = 1, .num_ctas = 5, .planned_lens = {1500}},
      "pieces without keys");
  for (const int32_t page_size : {1, 5, 16, 64}) {
    check<Choices, kDims>({.kv_lens = {900, 33, 500},
                           .num_kv_heads = 2,
                           .group_size = 2,
                           .qo_len = 2,
                           .page_size = page_size,
                           .num_ctas = 3,
                           .window_left = 203},
                          "ids before the window");
    check<Choices, kDims>({.kv_lens = {700, 40, 3, 330},
                           .num_kv_heads = 3,
                           .page_size = page_size,
                           .num_ctas = 3,
                           .window_left = page_size == 5 ? 250 : -1,
                           .planned_lens = {800, 40, 90, 400},
                           .misses_pages = true},
                          "ids outside of the cache");
  }
}

template <DType kQ, DType kKv, int kDims>
using Of = device::Traits<kQ, kKv, kDims, kDims, device::Standard>;

/// Work tiles that Mainloop computes, and whose first keys the work tile before them requests.
TEST(heads_of_128_dims) {
  using Bf16 = Of<kBf16, kBf16, 128>;
  check_all<Bf16, 128>();
  check<Bf16, 128>({.kv_lens = {900, 20, 0, 400, 64, 65, 700, 330, 1, 500},
                    .num_kv_heads = 2,
                    .group_size = 4,
                    .num_ctas = 2},
                   "many work tiles");
  check<Bf16, 128>({.kv_lens = {400, 10, 350, 0, 300, 500},
                    .num_kv_heads = 1,
                    .group_size = 5,
                    .qo_len = 3,
                    .page_size = 1,
                    .num_ctas = 1,
                    .planned_lens = {700, 300, 400, 200, 380, 640}},
                   "many work tiles that are shorter than planned");
}
TEST(heads_of_64_dims) { check_all<Of<kBf16, kBf16, 64>, 64>(); }
TEST(heads_of_80_dims) { check_all<device::With80Dims<Of<kF16, kF16, 128>>, 80>(); }
TEST(e4m3) { check_all<Of<kBf16, DType::kFloat8E4M3, 128>, 128>(); }
TEST(e5m2) { check_all<Of<kF16, DType::kFloat8E5M2, 64>, 64>(); }

/// The last dims of keys, in a tensor of their own.
template <typename Choices, int32_t kDims>
void check_tails(int32_t tail_dims) {
  check<Choices, kDims>({.kv_lens = {300, 1, 90},
                         .num_kv_heads = 3,
                         .qo_len = 3,
                         .page_size = 0,
                         .num_ctas = 4,
                         .tail_dims = tail_dims},
                        "tails");
  check<Choices, kDims>({.kv_lens = {100, 700, 0},
                         .num_kv_heads = 4,
                         .page_size = 0,
                         .num_ctas = 7,
                         .window_left = 150,
                         .planned_lens = {1500, 900, 40},
                         .tail_dims = tail_dims},
                        "tails, shorter than planned");
  check<Choices, kDims>({.kv_lens = {260, 200},
                         .num_kv_heads = 2,
                         .qo_len = 150,
                         .page_size = 0,
                         .num_ctas = 3,
                         .tail_dims = tail_dims},
                        "tails of prompts");
}
TEST(tails_of_keys) {
  check_tails<device::Traits<kF16, kF16, 192, 128, device::Standard>, 128>(64);
  check_tails<device::Traits<kBf16, DType::kFloat8E4M3, 192, 128, device::Standard>, 112>(32);
}

/// Two warps share rows.
template <typename Choices, int32_t kDims>
void check_wide() {
  check<Choices, kDims>({.kv_lens = {300, 1, 90, 0}, .num_kv_heads = 2, .num_ctas = 4}, "decodes");
  check<Choices, kDims>({.kv_lens = {260, 200},
                         .num_kv_heads = 1,
                         .group_size = 2,
                         .qo_len = 50,
                         .page_size = 5,
                         .num_ctas = 3,
                         .window_left = 60},
                        "prompts with a window");
  check<Choices, kDims>({.kv_lens = {100, 500, 0},
                         .num_kv_heads = 2,
                         .group_size = 3,
                         .page_size = 0,
                         .num_ctas = 5,
                         .planned_lens = {1500, 900, 40}},
                        "shorter than planned");
  check<Choices, kDims>(
      {.kv_lens = {400, 90}, .group_size = 8, .num_ctas = 2, .misses_pages = true},
      "missing pages");
}
TEST(heads_of_512_dims) {
  check_wide<Of<kBf16, kBf16, 512>, 512>();
  check_wide<Of<kF16, kF16, 512>, 320>();
  check_wide<Of<kBf16, DType::kFloat8E4M3, 512>, 512>();
}

/// 8-bit queries: decodes, drafts of several rows, and prompts, whose bodies widen them in
/// different places.
template <int kDims>
void check_narrow_queries() {
  using Choices = Of<DType::kFloat8E4M3, DType::kFloat8E4M3, kDims>;
  check_all<Choices, kDims>();
  for (const int32_t qo_len : {3, 12, 30}) {
    check<Choices, kDims>({.kv_lens = {300, 40, 130},
                           .num_kv_heads = 2,
                           .group_size = 4,
                           .qo_len = qo_len,
                           .num_ctas = 3},
                          "rows of 8-bit queries");
  }
}
TEST(e4m3_queries_of_64_dims) { check_narrow_queries<64>(); }
TEST(e4m3_queries_of_128_dims) { check_narrow_queries<128>(); }

/// Queries that float16 can not hold.
TEST(large_and_small_queries) {
  const Decodes decodes = {.kv_lens = {200, 90}, .num_kv_heads = 2, .group_size = 2, .num_ctas = 2};
  for (const float gain : {1e-36F, 1e-20F, 1e6F, 1e30F}) {
    check<Of<kBf16, DType::kFloat8E4M3, 128>, 128>(decodes, "queries", gain);
  }
}

/// With chunks the bits are the same on any number of CTAs.
template <typename Choices, int32_t kDims>
void check_chunks(Decodes decodes, const std::string& what) {
  std::vector<float> first;
  for (const int32_t num_ctas : {1, 2, 5, 12}) {
    decodes.num_ctas = num_ctas;
    check<Choices, kDims>(decodes, what);
    DecodeBatch<Choices, kDims> batch(decodes, true);
    const std::vector<float> results = batch.run();
    const size_t num_merges = batch.schedule().merges.size();
    if (num_ctas == 1) {
      CHECK_EQ(num_merges, size_t{0});
      first = results;
    }
    expect_equal_bits(results, first, what + ": other bits on other CTAs");
    if (num_ctas == 12) CHECK(num_merges > 2);
  }
}
TEST(chunks) {
  using Bf16 = Of<kBf16, kBf16, 128>;
  check_chunks<Bf16, 128>(
      {.kv_lens = {1500, 300, 0, 700}, .num_kv_heads = 3, .group_size = 4, .chunk_kv = 128},
      "chunks of few rows");
  check_chunks<Bf16, 128>({.kv_lens = {900, 500},
                           .num_kv_heads = 2,
                           .group_size = 7,
                           .qo_len = 6,
                           .window_left = 600,
                           .chunk_kv = 64},
                          "chunks of more rows");
  check_chunks<Bf16, 128>({.kv_lens = {300, 900, 5},
                           .num_kv_heads = 2,
                           .planned_lens = {1500, 900, 800},
                           .chunk_kv = 256},
                          "chunks of requests that are shorter than planned");
  check_chunks<Of<kBf16, DType::kFloat8E4M3, 64>, 64>(
      {.kv_lens = {900, 1300}, .num_kv_heads = 2, .group_size = 8, .chunk_kv = 256},
      "chunks of 8-bit keys");
}

TEST(heads_are_cut_in_pairs) {
  const Decodes decodes = {.kv_lens = {700, 650, 700}, .num_kv_heads = 4, .num_ctas = 7};
  const DecodeBatch<Of<kBf16, kBf16, 64>, 64> batch(decodes, true);
  CHECK(batch.cuts_pairs());
  check<Of<kBf16, kBf16, 64>, 64>(decodes, "cut pairs");
  check<Of<kBf16, DType::kFloat8E4M3, 128>, 128>(decodes, "cut pairs");
  check<device::With80Dims<Of<kBf16, kBf16, 128>>, 80>(decodes, "cut pairs");
}

}  // namespace
}  // namespace flashplan::test
