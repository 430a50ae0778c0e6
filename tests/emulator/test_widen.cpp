// SPDX-License-Identifier: Apache-2.0
// The kernels that widen 8-bit keys and values on Hopper, run by the emulator, against double
// arithmetic: requests are prepared, widened to the ring, or both side by side.
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "widen_batch.h"

namespace flashplan::test {
namespace {

template <int32_t kDims = 64, typename Variant = device::Standard>
void check(const Requests& requests, const char* what) {
  WidenBatch<kDims, Variant> batch(requests);
  check_together(batch, 0.03, what);
}

// Rows of 40 elements are not aligned.
TEST(widened) {
  check({.qo_lens = {100, 3}, .kv_lens = {300, 70}, .num_ctas = 1, .head_dim = 40}, "unaligned");
  check({.qo_lens = {1, 200, 5}, .kv_lens = {1, 300, 129}, .group_size = 2, .prepare_reads = 99},
        "several");
  check({.qo_lens = {30, 20}, .kv_lens = {300, 70}, .page_size = 0, .num_ctas = 3}, "ragged");
  check<256>({.qo_lens = {70, 3},
              .kv_lens = {200, 90},
              .num_ctas = 2,
              .head_dim = 256,
              .prepare_reads = 99},
             "256 dims");
}
TEST(narrow_queries) {
  check({.qo_lens = {100, 3}, .kv_lens = {300, 70}, .num_ctas = 1, .has_narrow_queries = true},
        "64 dims");
  check({.qo_lens = {100, 3},
         .kv_lens = {300, 70},
         .num_ctas = 1,
         .head_dim = 37,
         .has_narrow_queries = true},
        "odd rows");
  check<128>({.qo_lens = {1, 200, 70},
              .kv_lens = {1, 300, 129},
              .num_kv_heads = 2,
              .group_size = 3,
              .head_dim = 112,
              .has_narrow_queries = true},
             "heads");
  check<256>({.qo_lens = {70, 3},
              .kv_lens = {200, 90},
              .num_ctas = 2,
              .head_dim = 256,
              .has_narrow_queries = true},
             "256 dims");
}
TEST(prepared) {
  check({.qo_lens = {300}, .kv_lens = {400}, .num_ctas = 2}, "prepared");
  check<256>({.qo_lens = {200, 3}, .kv_lens = {230, 70}, .num_ctas = 2, .head_dim = 256},
             "256 dims");
}
/// A softcap and a mask of the user, which hides nothing. Shifts then follow logits that grow.
struct MaskedSoftcap : device::Softcap {
  static constexpr bool kReadsPositions = true;
  static constexpr bool kMasksLogits = true;

  using device::Softcap::Softcap;
  bool visible(const LogitPosition& at) const { return at.key >= 0; }
};
TEST(capped_logits_that_grow_with_the_key) {
  check<64, MaskedSoftcap>({.qo_lens = {100, 130},
                            .kv_lens = {500, 900},
                            .num_ctas = 2,
                            .growth = 0.1F,
                            .softcap = 30.0F},
                           "masked");
}
// More readers of a prefix than the list of a CTA holds: it searches its tiles for them, in rounds.
TEST(many_readers) {
  check({.qo_lens = std::vector<int32_t>(80, 1),
         .kv_lens = std::vector<int32_t>(80, 680),
         .num_ctas = 1,
         .prefix = 640},
        "one CTA");
}

Requests random_requests(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int32_t> from) {
    return from.begin()[random() % from.size()];
  };
  Requests r;
  const int32_t size = pick({1, 2, 3, 5, 8});
  r.prefix = pick({0, 0, 0, 160});
  r.num_kv_heads = pick({1, 1, 2});
  r.group_size = pick({1, 1, 2, 5});
  r.page_size = pick({1, 5, 16, 64, 0});
  r.num_ctas = pick({1, 2, 3, 7});
  r.head_dim = pick({64, 64, 40, 56});
  r.window_left = pick({-1, -1, -1, 0, 100, 200});
  r.prepare_reads = pick({1, 2, 3, 99});
  r.max_prepared = pick({0, 4, 1000, 1000});
  r.has_missing_pages = r.prefix == 0 && random() % 5 == 0;
  r.cuts_much = random() % 3 == 0;
  r.has_nan = random() % 6 == 0;
  r.is_csr = random() % 3 == 0;
  r.has_narrow_queries = random() % 3 == 0;
  const bool is_shorter = random() % 4 == 0;
  if (r.prefix > 0) r.window_left = -1;
  if (r.prefix > 0 && r.page_size == 0) r.page_size = 16;
  for (int32_t i = 0; i < size; ++i) {
    const int32_t qo_len = pick({0, 1, 1, 5, 70, 128, 200, 400}) / r.group_size;
    const int32_t kv_len =
        r.prefix + qo_len + pick({0, 0, 1, 60, 128, 200, 500, 900}) / (size > 3 ? 2 : 1);
    r.qo_lens.push_back(qo_len);
    r.kv_lens.push_back(kv_len);
    if (is_shorter) {
      r.planned_lens.push_back(kv_len);
      const auto least = static_cast<uint32_t>(r.prefix > 0 ? r.prefix + qo_len : 0);
      r.kv_lens.back() -=
          static_cast<int32_t>(random() % (static_cast<uint32_t>(kv_len) - least + 1));
    }
  }
  return r;
}
std::string text_of(const Requests& r) {
  std::string s = "qo";
  for (const int32_t n : r.qo_lens) s += " " + std::to_string(n);
  s += " kv";
  for (const int32_t n : r.kv_lens) s += " " + std::to_string(n);
  s += " planned";
  for (const int32_t n : r.planned_lens) s += " " + std::to_string(n);
  const auto add = [&](const char* name, int32_t n) {
    s += std::string(", ") + name + " " + std::to_string(n);
  };
  add("heads", r.num_kv_heads);
  add("group", r.group_size);
  add("page", r.page_size);
  add("CTAs", r.num_ctas);
  add("dims", r.head_dim);
  add("window", r.window_left);
  add("reads", r.prepare_reads);
  add("tiles", r.max_prepared);
  add("prefix", r.prefix);
  add("missing", r.has_missing_pages ? 1 : 0);
  add("cuts", r.cuts_much ? 1 : 0);
  add("NaN", r.has_nan ? 1 : 0);
  add("CSR", r.is_csr ? 1 : 0);
  add("narrow queries", r.has_narrow_queries ? 1 : 0);
  return s;
}
TEST(random_batches) {
  for (unsigned seed = 0; seed < 24; ++seed) {
    std::mt19937 random(seed);
    Requests r = random_requests(random);
    if (std::accumulate(r.qo_lens.begin(), r.qo_lens.end(), 0) == 0) continue;
    const std::string text = "batch " + std::to_string(seed) + ": " + text_of(r);
    if (seed % 2 == 0) {
      check(r, text.c_str());
    } else if (seed % 8 != 7) {
      r.head_dim = r.head_dim == 40 ? 72 : r.head_dim * 2;
      check<128>(r, text.c_str());
    } else {
      r.head_dim = r.head_dim == 40 ? 136 : r.head_dim * 4;
      check<256>(r, text.c_str());
    }
  }
}

}  // namespace
}  // namespace flashplan::test
