// SPDX-License-Identifier: Apache-2.0
// The operators of the CPU on lengths, ids and slots that are wrong, as they may be where another
// thread writes them after they were checked: nothing outside of the tensors is read or written.
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "ops/operators.h"

namespace flashplan::test {
namespace {

constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
constexpr int32_t kFar = 1 << 30;

/// Calls apply_penalties() on four logits of 1.0, with a penalty that subtracts 0.5 from those of
/// the tokens in `history`, and returns the logits. The tensor has room for `max_len` tokens; `len`
/// is the length that it is given.
std::vector<float> penalised(const int32_t* history, int32_t len, int32_t max_len) {
  std::vector<float> logits(4, 1.0F);
  PenaltyParams p;
  p.logits = reinterpret_cast<char*>(logits.data());
  p.history = history;
  p.history_lens = &len;
  p.repetition = {1.0F, nullptr};
  p.presence = {0.5F, nullptr};
  p.frequency = {0.0F, nullptr};
  p.num_rows = 1;
  p.vocab = static_cast<int32_t>(logits.size());
  p.max_len = max_len;
  CHECK(cpu::apply_penalties(p).ok());
  return logits;
}

TEST(penalties_of_what_is_no_token) {
  for (const int32_t wrong : {-1, kLeast, 4, kFar, kMost}) {
    const int32_t history[] = {wrong, 2, wrong};
    CHECK(penalised(history, 3, 3) == (std::vector<float>{1.0F, 1.0F, 0.5F, 1.0F}));
  }
}

TEST(penalties_of_more_tokens_than_there_are) {
  const int32_t history[] = {1, 2};  // of which the tensor has the first one
  for (const int32_t len : {kLeast, -1, 2, kFar, kMost}) {
    const float second = len < 0 ? 1.0F : 0.5F;
    CHECK(penalised(history, len, 1) == (std::vector<float>{1.0F, second, 1.0F, 1.0F}));
  }
}

TEST(drafts_that_are_no_token_are_skipped) {
  constexpr int32_t kVocab = 4;
  const std::vector<float> probs = {0.0F, 0.0F, 0.0F, 1.0F, 0.0F, 0.0F, 0.0F, 1.0F};
  for (const int64_t wrong : {int64_t{-2}, int64_t{kVocab}, int64_t{kFar}, int64_t{1} << 40}) {
    int32_t out[2] = {};
    int32_t num_accepted = -1;
    VerifyParams p;
    p.tokens = &wrong;
    p.has_wide_tokens = true;
    p.draft_probs = p.target_probs = reinterpret_cast<const char*>(probs.data());
    p.target_row_stride = kVocab * sizeof(float);
    p.num_rows = p.num_drafts = 1;
    p.vocab = kVocab;
    p.out = out;
    p.num_accepted = &num_accepted;
    CHECK(cpu::speculative_verify(p).ok());
    CHECK_EQ(num_accepted, 0);
    CHECK_EQ(out[0], 3);
  }
}

/// Two requests of one token each, with a page of two rows each, of a cache of two pages.
struct Append {
  std::vector<int32_t> indptr = {0, 1, 2};
  std::vector<int32_t> kv_lens = {1, 1};
  std::vector<int32_t> page_indptr = {0, 1, 2};
  std::vector<int32_t> ids = {0, 1};
  std::vector<int64_t> slots;
  float rows[2] = {1.0F, 2.0F};
  std::vector<float> cache = std::vector<float>(6);  // a row without a page at each end

  /// The rows of the cache.
  std::vector<float> run(bool csr) {
    AppendParams p;
    for (AppendSide& side : p.sides) {
      side.rows = reinterpret_cast<const char*>(rows);
      side.token_stride = side.row_stride = sizeof(float);
      side.cache = reinterpret_cast<char*>(cache.data() + 1);
      side.page_stride = 2 * sizeof(float);
      side.num_heads = side.head_dim = 1;
    }
    p.places.pages.page_size = make_divisor(2);
    if (slots.empty()) {
      p.places.indptr = indptr.data();
      p.places.kv_lens = kv_lens.data();
      p.places.pages.ids = ids.data();
      p.places.pages.indptr = csr ? page_indptr.data() : nullptr;
      p.places.pages.row_stride = 1;
      p.places.pages.num_ids = csr ? 2 : 1;
    } else {
      p.places.slots = slots.data();
    }
    p.places.batch_size = p.places.pages.num_pages = p.num_rows = 2;
    cpu::append_paged_kv(p);
    CHECK_EQ(cache.front() + cache.back(), 0.0F);
    return {cache.begin() + 1, cache.end() - 1};
  }
};

TEST(appended_tokens_stay_in_the_cache) {
  const std::vector<float> nothing(4), right = {1.0F, 0.0F, 2.0F, 0.0F};
  for (const bool csr : {false, true}) {
    CHECK(Append().run(csr) == right);
    for (const int32_t wrong : {kLeast, -1, kFar, kMost}) {
      Append lens, ids;
      lens.kv_lens = {wrong, wrong};
      CHECK(lens.run(csr) == nothing);
      ids.ids = {wrong, wrong};
      CHECK(ids.run(csr) == nothing);
    }
  }
  for (const int32_t wrong : {kLeast, -1, kFar, kMost}) {
    Append rows, slots;
    rows.page_indptr = {wrong, wrong, wrong};
    CHECK(rows.run(true) == nothing);
    slots.slots = {wrong, int64_t{wrong} << 20};
    CHECK(slots.run(false) == nothing);
  }
}

TEST(tokens_outside_of_the_table_are_not_rotated) {
  const std::vector<float> table = {0.0F, 1.0F};  // a quarter turn at position 0
  for (const int32_t position : {0, -1, 1, kLeast, kFar, kMost}) {
    std::vector<float> x = {2.0F, 3.0F};
    RopeParams p;
    p.sides[0].from = reinterpret_cast<const char*>(x.data());
    p.sides[0].to = reinterpret_cast<char*>(x.data());
    p.sides[0].num_heads = 1;
    p.positions = &position;
    p.num_rows = 1;
    p.head_dim = p.rotary_dim = 2;
    p.table = table.data();
    p.table_stride = 2;
    p.table_rows = 1;
    cpu::apply_rope(p);
    const std::vector<float> rotated = {-3.0F, 2.0F};
    CHECK(x == (position == 0 ? rotated : std::vector<float>{2.0F, 3.0F}));
  }
}

TEST(tokens_of_no_request_are_skipped) {
  for (const int32_t end : {0, -1, kLeast}) {
    Append append;
    // Behind the two requests lies what looks like a third one.
    append.indptr = {end, end, end, 2};
    append.kv_lens = {1, 1, 1};
    append.ids = {0, 1, 0};
    CHECK(append.run(false) == std::vector<float>(4));
  }
  Append late;
  late.indptr = {kMost, kMost, kMost};
  CHECK(late.run(false) == std::vector<float>(4));
}

}  // namespace
}  // namespace flashplan::test
