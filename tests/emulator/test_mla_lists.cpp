// SPDX-License-Identifier: Apache-2.0
// The sm90_mla kernels with lists of keys, run by the emulator, against double arithmetic: entries
// that are none, keys listed twice, lists shorter than planned, cut and whole. Rows of the cache
// that no list names are NaN.
#include "kernels/device/sm90/mla/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention_batch.h"
#include "kernels/device/traits.h"
#include "run_ctas.h"
#include "run_together.h"

namespace flashplan::test {
namespace {

constexpr DType kBf16 = DType::kBFloat16;
constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

struct Listed {
  std::vector<int32_t> planned_lens;  // of each token
  int32_t num_heads = 16;
  int32_t page_size = 64;
  int32_t num_ctas = 1;
  int32_t columns = 0;                  // of the lists; 0: the largest length
  std::vector<int32_t> real_lens = {};  // topk_lens
  double missing = 0.2;                 // part of the entries that are none
  bool aligned = true;
  bool has_tails = false;  // the last dims are in tensors of their own
  bool has_sinks = false;
  float growth = 1.0F;  // of keys along the list
  bool leans = false;   // keys point away from queries: logits are far below 0
  int32_t chunk_kv = 0;
};

size_t at(int64_t i) { return static_cast<size_t>(i); }

/// For a kernel of kQk dims, of one CTA for each queue or of pairs.
template <int32_t kQk, DType kKv = kBf16, bool kPairs = false>
class ListBatch : public AttentionBatch {
  static constexpr int32_t kVo = 512;
  using Choices = device::Traits<kBf16, kKv, kQk, kVo, device::Standard>;
  using S = device::MlaShape<Choices, kPairs>;

 public:
  explicit ListBatch(const Listed& listed)
      : AttentionBatch(numbers_of(listed)), l_(listed), columns_(columns_of(listed)) {
    make_lists();
    ScheduleShape shape = this->shape(S::kRowsOfTile, S::kTileKv);
    shape.item_steps = 16;
    make_schedule(shape, kVo);
    make_params();
    params_.tensors.pages.ids = nullptr;
    params_.workspace.scratch = scratch_.data();
    params_.workspace.scratch_bytes = static_cast<int64_t>(scratch_.size() * sizeof(float4));
    params_.lists = {lists_.data(), columns_ + 1, columns_};
  }

  void run(const std::vector<int32_t>& order) {
    begin_run();
    if constexpr (kPairs) {
      run_pairs(
          params_, order, S::kThreads, ++num_runs_, [] {},
          [&] { device::sm90_mla_pairs_kernel<Choices>(params_); });
    } else {
      run_one_by_one(params_, order, S::kThreads,
                     [&] { device::sm90_mla_kernel<Choices>(params_); });
    }
    CHECK(leaves_no_trace());
  }

 private:
  static int32_t columns_of(const Listed& l) {
    if (l.columns > 0) return l.columns;
    return *std::max_element(l.planned_lens.begin(), l.planned_lens.end());
  }
  static BatchNumbers numbers_of(const Listed& l) {
    const int32_t tail_dims = l.has_tails ? kQk - kVo : 0;
    return {.qo_lens = std::vector<int32_t>(l.planned_lens.size(), 1),
            .kv_lens = l.real_lens.empty() ? l.planned_lens : l.real_lens,
            .planned_lens = l.real_lens.empty() ? std::vector<int32_t>() : l.planned_lens,
            .group_size = l.num_heads,
            .page_size = l.page_size,
            .num_pages = (2 * columns_of(l) + 40) / l.page_size + 3,
            .num_ctas = l.num_ctas,
            .head_dim_qk = kQk,
            .head_dim_vo = kVo,
            .q_tail_dims = tail_dims,
            .k_tail_dims = tail_dims,
            .shared_kv = true,
            .aligned = l.aligned,
            .kv_dtype = kKv,
            .o_dtype = DType::kFloat32,
            .has_sinks = l.has_sinks,
            .logits_scale = 1.0F / std::sqrt(static_cast<float>(kQk)),
            .chunk_kv = l.chunk_kv};
  }

  /// How many entries of a token's list count.
  int32_t count_of(int32_t token) const {
    return std::clamp(std::min(kv_len(token), l_.planned_lens[at(token)]), 0, columns_);
  }
  int32_t& slot(int32_t token, int32_t i) { return lists_[at(token * (columns_ + 1) + i)]; }
  std::vector<int64_t> keys_of(int32_t token, int32_t) const override {
    std::vector<int64_t> keys;
    for (int32_t i = 0; i < count_of(token); ++i) {
      const int32_t slot = lists_[at(token * (columns_ + 1) + i)];
      if (slot >= 0 && slot < places_.num_rows()) keys.push_back(slot);
    }
    return keys;
  }

  /// Half of the cache's rows may be listed. What is behind the entries that count is not one of
  /// them, and the column behind the lists is no part of these.
  void make_lists() {
    random_.seed(7);  // so that the first tokens have the same lists in batches of more tokens
    std::normal_distribution<float> normal;
    const auto num_slots = static_cast<int32_t>(places_.num_rows());
    std::vector<int32_t> slots(at(num_slots));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_);
    const int32_t num_listed = num_slots / 2;
    std::vector<float> direction(kQk, 0.0F);
    for (float& x : direction) x = l_.leans ? normal(random_) : 0.0F;
    const auto write = [&](Rows& rows, Rows& tails, int64_t row, float gain, float along) {
      std::vector<float> numbers(kQk);
      for (int32_t d = 0; d < kQk; ++d) {
        numbers[at(d)] = gain * (normal(random_) + along * direction[at(d)]);
      }
      rows.write(row, numbers.data());
      tails.write(row, numbers.data() + kVo);
    };
    for (int32_t i = 0; i < num_listed; ++i) {
      write(k_, k_tail_, slots[at(i)], std::pow(l_.growth, static_cast<float>(i / 64)), -4.0F);
    }
    const int32_t none[] = {-1, -l_.page_size, num_slots, kMin, kMax};
    std::bernoulli_distribution is_missing(l_.missing);
    lists_.assign(at(num_tokens() * (columns_ + 1)), slots.back());
    for (int32_t t = 0; t < num_tokens(); ++t) {
      for (int32_t h = 0; h < num_heads(); ++h) {
        write(q_, q_tail_, int64_t{t} * num_heads() + h, 1.0F, 1.0F);
      }
      for (int32_t i = 0; i < count_of(t); ++i) {
        const auto pick = static_cast<int32_t>(random_() % 64);
        slot(t, i) =
            is_missing(random_) ? none[pick % 5] : slots[at((i / 64 * 64 + pick) % num_listed)];
      }
    }
  }

  const Listed l_;
  const int32_t columns_;
  std::vector<int32_t> lists_;  // [tokens, columns + 1]
  std::vector<float4> scratch_ = std::vector<float4>(
      S::kCtas * (S::kTileQ * kVo / 4 + S::kConsumerThreads), {NAN, NAN, NAN, NAN});
  unsigned num_runs_ = 0;
};

template <int32_t kQk = 576, DType kKv = kBf16, bool kPairs = false>
void check(const Listed& listed, const char* what) {
  ListBatch<kQk, kKv, kPairs> batch(listed);
  check_one_by_one(batch, listed.num_ctas, 0.02, what);
}

/// Chunks are computed by themselves, whichever CTAs have them, and whatever was planned.
template <DType kKv = kBf16, bool kPairs = false>
void check_chunks(Listed listed, const char* what) {
  listed.chunk_kv = 128;
  std::vector<float> wanted;
  for (const int32_t num_ctas : {1, 2, 5, 9}) {
    for (const bool has_neighbours : {false, true}) {
      Listed other = listed;
      other.num_ctas = num_ctas;
      other.columns = 700;
      if (has_neighbours) {
        for (const int32_t len : {300, 64}) {
          other.planned_lens.push_back(len);
          if (!other.real_lens.empty()) other.real_lens.push_back(len);
        }
      }
      ListBatch<576, kKv, kPairs> batch(other);
      std::vector<int32_t> order = in_order(num_ctas);
      std::reverse(order.begin(), order.end());
      batch.run(order);
      CHECK(batch.error() < 0.02);
      CHECK(num_ctas > 1 || batch.schedule().num_partial_rows == 0);
      CHECK(num_ctas < 9 || batch.schedule().num_partial_rows > 0);
      std::vector<float> got = batch.results();
      got.resize(got.size() / other.planned_lens.size() * listed.planned_lens.size());
      if (wanted.empty()) wanted = got;
      expect_equal_bits(got, wanted, std::string(what) + ": other bits");
    }
  }
}

TEST(chunks) {
  check_chunks({.planned_lens = {700}, .num_heads = 12, .has_sinks = true}, "pieces");
  check_chunks({.planned_lens = {640, 129, 128}, .num_heads = 80}, "several tiles");
  check_chunks({.planned_lens = {650, 300}, .missing = 0.99}, "chunks without keys");
  check_chunks({.planned_lens = {650, 500}, .real_lens = {200, 0}}, "real lengths");
  check_chunks({.planned_lens = {650}, .growth = 2.0F}, "growing");
  check_chunks<DType::kFp8DsMla>({.planned_lens = {650}}, "8 bits");
  check_chunks<DType::kFp8DsMla, true>({.planned_lens = {650, 300}, .num_heads = 128}, "pairs");
  check_chunks<DType::kFloat8E4M3, true>(
      {.planned_lens = {650, 500}, .num_heads = 72, .real_lens = {200, 0}}, "shorter pairs");
}

TEST(lists) {
  for (const int32_t page_size : {1, 5, 16, 64}) {
    check({.planned_lens = {64, 130, 1, 250}, .page_size = page_size}, "page sizes");
  }
  check({.planned_lens = {130, 70}, .num_heads = 96}, "several row tiles");
  check({.planned_lens = {130, 70}, .missing = 0.0}, "nothing but keys");
  check({.planned_lens = {130, 0, 3}, .missing = 1.0}, "no keys");
  check({.planned_lens = {130, 3}, .missing = 0.97, .has_sinks = true}, "few keys");
  check({.planned_lens = {130, 3}, .missing = 1.0, .has_sinks = true}, "sinks alone");
}
TEST(tensors_of_lists) {
  check({.planned_lens = {130, 70}, .aligned = false}, "not aligned");
  check({.planned_lens = {90}, .page_size = 16, .has_tails = true}, "two tensors");
  check({.planned_lens = {90}, .page_size = 16, .aligned = false, .has_tails = true}, "both");
  check<512>({.planned_lens = {150, 64}, .page_size = 3}, "whole rows as values");
}
template <DType kKv>
void check_8_bits() {
  check<576, kKv>({.planned_lens = {64, 130, 1, 250}}, "pages");
  check<576, kKv>({.planned_lens = {130, 70}, .num_heads = 96, .page_size = 1}, "rows");
  check<576, kKv>({.planned_lens = {130, 70}, .aligned = false}, "not aligned");
  check<576, kKv>({.planned_lens = {130, 0, 3}, .missing = 1.0}, "no keys");
  check<576, kKv>({.planned_lens = {330, 200}, .num_ctas = 5, .missing = 0.98}, "few keys");
  check<576, kKv>({.planned_lens = {400}, .num_ctas = 3, .real_lens = {270}}, "shorter");
}
TEST(keys_of_8_bits) {
  check_8_bits<DType::kFloat8E4M3>();
  check_8_bits<DType::kFp8DsMla>();
}
template <DType kKv>
void check_pairs() {
  constexpr auto check_pair = [](const Listed& listed, const char* what) {
    check<576, kKv, true>(listed, what);
  };
  check_pair({.planned_lens = {64, 130, 1, 250}, .num_heads = 128}, "pages");
  check_pair({.planned_lens = {130, 70}, .num_heads = 96, .page_size = 1}, "rows");
  check_pair({.planned_lens = {130, 70}, .num_heads = 72, .aligned = false}, "not aligned");
  check_pair({.planned_lens = {130, 0, 3}, .num_heads = 128, .missing = 1.0}, "no keys");
  check_pair({.planned_lens = {330, 200}, .num_heads = 128, .num_ctas = 5, .missing = 0.98},
             "few keys");
  check_pair({.planned_lens = {400}, .num_heads = 128, .num_ctas = 3, .real_lens = {270}},
             "shorter");
  check_pair({.planned_lens = {250}, .num_heads = 128, .growth = 0.5F, .leans = true},
             "far below 0");
}
TEST(pairs_of_ctas) {
  check_pairs<DType::kFloat8E4M3>();
  check_pairs<DType::kFp8DsMla>();
}
TEST(lengths_of_lists) {
  check({.planned_lens = {130, 200, 30}, .columns = 100}, "fewer columns than planned");
  check({.planned_lens = {64, 30}, .columns = 300}, "more columns than planned");
  check({.planned_lens = {130, 200, 30, 5}, .real_lens = {129, 0, 60, -3}}, "real lengths");
  check({.planned_lens = {400, 300}, .num_ctas = 4, .columns = 90}, "cut, fewer columns");
  check({.planned_lens = {400, 300}, .num_ctas = 4, .real_lens = {20, 170}}, "cut, real lengths");
}
TEST(cut_lists) {
  check({.planned_lens = {700}, .num_heads = 12, .num_ctas = 4, .has_sinks = true}, "pieces");
  check({.planned_lens = {330, 5, 70}, .num_heads = 80, .num_ctas = 3}, "several tiles");
  check({.planned_lens = {330, 200}, .num_ctas = 5, .missing = 0.98}, "pieces without keys");
}
TEST(logits_of_lists_that_grow) {
  check({.planned_lens = {450}, .growth = 2.0F}, "growing");
  check({.planned_lens = {450}, .num_ctas = 2, .growth = 0.5F}, "shrinking");
  check({.planned_lens = {250}, .growth = 0.5F, .leans = true}, "far below 0");
}

}  // namespace
}  // namespace flashplan::test
