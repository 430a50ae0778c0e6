// SPDX-License-Identifier: Apache-2.0
// The sm90_mla kernels with lists of keys, run by the emulator, against double arithmetic: entries
// that are none, keys listed twice, lists shorter than planned, cut and whole. Rows of the cache
// that no list names are NaN.
#include "kernels/device/sm90/mla/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/device/traits.h"
#include "mla_bytes.h"
#include "owning_scheduler.h"

namespace flashplan::test {
namespace {

using device::Element;
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

/// A kernel, and tensors of a batch for it.
template <int32_t kQk, DType kKv = kBf16>
class ListBatch {
  static constexpr int32_t kVo = 512;
  static constexpr int32_t kTail = kQk - kVo;
  using Choices = device::Traits<kBf16, kKv, kQk, kVo, device::Standard>;
  using S = device::MlaShape<Choices>;

 public:
  explicit ListBatch(const Listed& listed)
      : l_(listed),
        tokens_(static_cast<int32_t>(listed.planned_lens.size())),
        columns_(listed.columns > 0
                     ? listed.columns
                     : *std::max_element(listed.planned_lens.begin(), listed.planned_lens.end())),
        q_stride_((l_.has_tails ? kVo : kQk) + (l_.aligned ? 8 : 3)),
        k_stride_((l_.has_tails ? kVo : kQk) + (l_.aligned ? 16 : 5)) {
    make_tensors();
    schedule();
    make_params();
  }

  void run(const std::vector<int32_t>& order) {
    std::fill(o_.begin(), o_.end(), NAN);
    std::fill(lse_.begin(), lse_.end(), NAN);
    static simt::Machine machine;
    for (const int32_t c : order) {
      params_.schedule.starts = starts_.data() + c;  // it runs as CTA 0
      machine.run(1, 1, S::kThreads, [&] { device::sm90_mla_kernel<Choices>(params_); });
    }
    for (const Arrivals& arrivals : arrivals_) {
      for (const int32_t counter : arrivals.counters) CHECK_EQ(counter, 0);
    }
  }
  const std::vector<float>& results() const { return o_; }
  const std::vector<float>& lse() const { return lse_; }
  int32_t num_partial_rows() const { return scheduler_->schedule().num_partial_rows; }

  /// The largest error of o and lse, in units of the largest value of a row.
  double error() const {
    double worst = 0;
    for (int32_t t = 0; t < tokens_; ++t) {
      for (int32_t h = 0; h < l_.num_heads; ++h) worst = std::max(worst, error_of_row(t, h));
    }
    return worst;
  }

 private:
  static size_t at(int64_t i) { return static_cast<size_t>(i); }
  static float value_of(uint16_t bits) { return Element<kBf16>::unpack(bits).x; }
  int32_t num_slots() const { return num_pages_ * l_.page_size; }
  /// How many entries of a token's list count.
  int32_t count_of(int32_t token) const {
    int32_t count = std::min(l_.planned_lens[at(token)], columns_);
    if (!l_.real_lens.empty()) count = std::min(count, std::max(l_.real_lens[at(token)], 0));
    return count;
  }
  int32_t slot(int32_t token, int32_t i) const { return lists_[at(token * (columns_ + 1) + i)]; }
  template <typename Rows>
  auto& element(Rows& rows, Rows& tails, int64_t stride, int64_t row, int32_t d) const {
    const bool is_tail = l_.has_tails && d >= kVo;
    return is_tail ? tails[at(row * 64 + d - kVo)] : rows[at(row * stride + d)];
  }

  void make_tensors() {
    std::normal_distribution<float> normal;
    const auto number = [&](float gain, float mean) {
      return static_cast<uint16_t>(Element<kBf16>::pack(mean + normal(random_) * gain, 0.0F));
    };
    num_pages_ = (2 * columns_ + 40) / l_.page_size + 3;
    q_.assign(at(int64_t{tokens_} * l_.num_heads * q_stride_ + 8), 0xffff);
    q_tail_.assign(at(int64_t{tokens_} * l_.num_heads * 64), 0xffff);
    k_.assign(at(int64_t{num_slots()} * k_stride_ + 8), 0xffff);
    k_tail_.assign(at(int64_t{num_slots()} * 64), 0xffff);
    bytes_.emplace(num_slots(), kKv == DType::kFp8DsMla ? kDsMlaBytes : kQk, l_.aligned ? 16 : 3);
    std::vector<float> direction(kQk, 0.0F);
    for (float& x : direction) x = l_.leans ? normal(random_) : 0.0F;
    // Behind what counts are rows of NaN. The column behind the lists is no part of them.
    std::vector<int32_t> slots(at(num_slots()));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_);
    const int32_t num_listed = num_slots() / 2;
    lists_.assign(at(tokens_ * (columns_ + 1)), slots.back());
    for (int32_t i = 0; i < num_listed; ++i) {
      const float gain = std::pow(l_.growth, static_cast<float>(i / 64));
      std::vector<float> numbers(kQk);
      for (int32_t d = 0; d < kQk; ++d) {
        numbers[at(d)] = value_of(number(gain, -4.0F * gain * direction[at(d)]));
      }
      write_bytes(slots[at(i)], numbers.data());
      for (int32_t d = 0; d < kQk; ++d) {
        element(k_, k_tail_, k_stride_, slots[at(i)], d) =
            static_cast<uint16_t>(Element<kBf16>::pack(numbers[at(d)], 0.0F));
      }
    }
    const int32_t none[] = {-1, -l_.page_size, num_slots(), kMin, kMax};
    std::bernoulli_distribution is_missing(l_.missing);
    for (int32_t t = 0; t < tokens_; ++t) {
      for (int32_t h = 0; h < l_.num_heads; ++h) {
        for (int32_t d = 0; d < kQk; ++d) {
          element(q_, q_tail_, q_stride_, t * l_.num_heads + h, d) = number(1.0F, direction[at(d)]);
        }
      }
      for (int32_t i = 0; i < count_of(t); ++i) {
        const auto pick = static_cast<int32_t>(random_() % 64);
        lists_[at(t * (columns_ + 1) + i)] =
            is_missing(random_) ? none[pick % 5] : slots[at((i / 64 * 64 + pick) % num_listed)];
      }
    }
    o_.assign(at(tokens_ * l_.num_heads * kVo), NAN);
    lse_.assign(at(tokens_ * l_.num_heads), NAN);
    sinks_.assign(at(l_.num_heads), 0.5F);
  }

  /// Of a key in a cache of 8 bits. Its numbers become those that the cache has.
  void write_bytes(int32_t slot, float* numbers) {
    if constexpr (kKv == DType::kFp8DsMla) {
      narrow_ds_mla(numbers, bytes_->row(slot));
    } else if constexpr (kKv == DType::kFloat8E4M3) {
      narrow(numbers, kQk, 1.0F, bytes_->row(slot));
    }
  }

  void schedule() {
    ScheduleShape shape;
    shape.group_size = l_.num_heads;
    shape.mask = {true, -1};
    shape.paged = true;
    shape.tile_q = S::kTileQ;
    shape.tile_kv = S::kTileKv;
    shape.num_ctas = l_.num_ctas;
    shape.max_partial_slots = l_.chunk_kv > 0 ? 64 : 3 * l_.num_ctas;
    shape.chunk_kv = l_.chunk_kv;
    shape.item_steps = 16;
    shape.cost = {.tile = 10, .step = 200, .split = 10};  // cuts cost little: there are many
    std::vector<int32_t> qo_indptr(at(tokens_) + 1);
    std::iota(qo_indptr.begin(), qo_indptr.end(), 0);
    scheduler_.emplace(shape, tokens_, tokens_);
    scheduler_->make({qo_indptr.data(), l_.planned_lens.data(), nullptr, tokens_});
    const Schedule& s = scheduler_->schedule();
    merges_.assign(at(s.first_merge), {});
    merges_.insert(merges_.end(), s.merges.begin(), s.merges.end());
    arrivals_.assign(merges_.size(), {});
    starts_.assign(at(l_.num_ctas), {});
    for (size_t c = 0; c < starts_.size(); ++c) {
      QueueStart& start = starts_[c];
      start.begin = s.cta_indptr[c];
      start.end = s.cta_indptr[c + 1];
      for (int32_t i = 0; i < std::min(start.end - start.begin, 2); ++i) {
        start.tiles[i] = s.tiles[at(start.begin + i)];
        start.segments[i] = s.segments[at(start.tiles[i].segment)];
      }
    }
    partial_o_.assign(at(s.num_partial_rows) * kVo + 4, NAN);
    partial_lse_.assign(at(s.num_partial_rows) + 1, NAN);
  }

  void make_params() {
    const Schedule& s = scheduler_->schedule();
    params_.schedule = {.tile_q = S::kTileQ,
                        .group_size = make_divisor(l_.num_heads),
                        .chunk_kv = l_.chunk_kv,
                        .segments = s.segments.data(),
                        .tiles = s.tiles.data(),
                        .merges = merges_.data(),
                        .arrivals = arrivals_.data(),
                        .num_ctas = l_.num_ctas};
    TensorParams& t = params_.tensors;
    t.k = {k_.data(), l_.page_size * k_stride_, k_stride_, 0};
    if (kKv != kBf16) t.k = {bytes_->first, l_.page_size * bytes_->stride, bytes_->stride, 0};
    t.v = t.k;
    t.pages = {.page_size = make_divisor(l_.page_size), .num_pages = num_pages_};
    if (!l_.real_lens.empty()) t.kv_lens = l_.real_lens.data();
    const int64_t heads = l_.num_heads;
    t.q = {q_.data(), heads * q_stride_, q_stride_};
    t.o = {o_.data(), heads * kVo, kVo};
    t.lse = {lse_.data(), heads, 1};
    t.q_dtype = kBf16;
    t.kv_dtype = kKv;
    t.o_dtype = DType::kFloat32;
    t.vectorized = l_.aligned;
    t.head_dim_qk = kQk;
    t.head_dim_vo = kVo;
    if (l_.has_tails) {
      params_.tails.q = {q_tail_.data(), heads * 64, 64};
      params_.tails.q_dims = kTail;
      params_.tails.k = {{k_tail_.data(), l_.page_size * int64_t{64}, 64, 0}, kTail};
    }
    params_.mask = {true, -1};
    params_.variant.logits_scale = scale();
    params_.variant.v_scale = 1.0F;
    if (l_.has_sinks) params_.variant.sinks = {sinks_.data(), false};
    params_.workspace = {scratch_.data(), static_cast<int64_t>(scratch_.size() * 16),
                         partial_o_.data(), partial_lse_.data()};
    params_.lists = {lists_.data(), columns_ + 1, columns_};
  }

  float scale() const { return 1.0F / std::sqrt(static_cast<float>(kQk)); }

  double error_of_row(int32_t token, int32_t head) const {
    std::vector<double> logits;
    std::vector<int32_t> seen;
    const int64_t row = int64_t{token} * l_.num_heads + head;
    double largest = l_.has_sinks ? 0.5 : -HUGE_VAL;
    for (int32_t i = 0; i < count_of(token); ++i) {
      const int32_t key = slot(token, i);
      if (key < 0 || key >= num_slots()) continue;
      double x = 0;
      for (int32_t d = 0; d < kQk; ++d) {
        x += double{value_of(element(q_, q_tail_, q_stride_, row, d))} *
             double{value_of(element(k_, k_tail_, k_stride_, key, d))};
      }
      seen.push_back(key);
      logits.push_back(x * double{scale()});
      largest = std::max(largest, logits.back());
    }
    double sum = l_.has_sinks ? std::exp(0.5 - largest) : 0;
    std::vector<double> wanted(kVo, 0.0);
    for (size_t i = 0; i < seen.size(); ++i) {
      const double weight = std::exp(logits[i] - largest);
      sum += weight;
      for (int32_t d = 0; d < kVo; ++d) {
        wanted[at(d)] += weight * double{value_of(element(k_, k_tail_, k_stride_, seen[i], d))};
      }
    }
    const float lse = lse_[at(row)];
    const float* o = o_.data() + row * kVo;
    if (sum == 0) {
      const bool is_zero = std::all_of(o, o + kVo, [](float x) { return x == 0; });
      return lse == -HUGE_VALF && is_zero ? 0 : HUGE_VAL;
    }
    if (std::isnan(lse)) return HUGE_VAL;
    double worst = std::fabs(double{lse} - (largest + std::log(sum)));
    double size = 0.1;
    for (const double x : wanted) size = std::max(size, std::fabs(x / sum));
    for (int32_t d = 0; d < kVo; ++d) {
      const double difference = std::fabs(double{o[d]} - wanted[at(d)] / sum);
      worst = std::max(worst, std::isnan(o[d]) ? HUGE_VAL : difference / size);
    }
    return worst;
  }

  const Listed l_;
  const int32_t tokens_;
  const int32_t columns_;
  const int64_t q_stride_;
  const int64_t k_stride_;
  std::mt19937 random_{7};
  int32_t num_pages_ = 0;
  std::vector<uint16_t> q_, k_, q_tail_, k_tail_;
  std::optional<ByteRows> bytes_;  // instead of k_
  std::vector<int32_t> lists_;     // [tokens, columns + 1]
  std::vector<float> o_, lse_, partial_o_, partial_lse_, sinks_;
  std::vector<float4> scratch_ =
      std::vector<float4>(S::kTileQ * 512 / 4 + S::kConsumerThreads, {NAN, NAN, NAN, NAN});
  std::optional<OwningScheduler> scheduler_;
  std::vector<Merge> merges_;
  std::vector<Arrivals> arrivals_;
  std::vector<QueueStart> starts_;
  AttentionParams params_;
};

template <int32_t kQk = 576, DType kKv = kBf16>
void check(const Listed& listed, const char* what) {
  ListBatch<kQk, kKv> batch(listed);
  std::vector<int32_t> order(static_cast<size_t>(listed.num_ctas));
  std::iota(order.begin(), order.end(), 0);
  batch.run(order);
  const double error = batch.error();
  if (!(error < 0.02)) {
    check::fail(__FILE__, __LINE__, std::string(what) + ": error " + std::to_string(error));
  }
  if (listed.num_ctas == 1) return;
  const std::vector<float> first = batch.results();
  std::reverse(order.begin(), order.end());
  batch.run(order);
  if (std::memcmp(first.data(), batch.results().data(), first.size() * 4) != 0) {
    check::fail(__FILE__, __LINE__, std::string(what) + ": other bits in another order");
  }
}

/// The results of the first `tokens` tokens in a batch, o and lse, as bits.
template <typename Batch>
std::vector<float> first_results(const Batch& batch, int32_t tokens, int32_t num_heads) {
  const auto rows = static_cast<size_t>(tokens * num_heads);
  std::vector<float> bits(batch.results().data(), batch.results().data() + rows * 512);
  bits.insert(bits.end(), batch.lse().data(), batch.lse().data() + rows);
  return bits;
}

/// Chunks are computed by themselves, whichever CTAs have them, and whatever was planned.
template <DType kKv = kBf16>
void check_chunks(Listed listed, const char* what) {
  const auto tokens = static_cast<int32_t>(listed.planned_lens.size());
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
      ListBatch<576, kKv> batch(other);
      std::vector<int32_t> order(static_cast<size_t>(num_ctas));
      std::iota(order.rbegin(), order.rend(), 0);
      batch.run(order);
      CHECK(batch.error() < 0.02);
      CHECK(num_ctas > 1 || batch.num_partial_rows() == 0);
      CHECK(num_ctas < 9 || batch.num_partial_rows() > 0);
      const std::vector<float> got = first_results(batch, tokens, listed.num_heads);
      if (wanted.empty()) wanted = got;
      if (std::memcmp(got.data(), wanted.data(), got.size() * 4) != 0) {
        check::fail(__FILE__, __LINE__, std::string(what) + ": other bits");
      }
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
