// SPDX-License-Identifier: Apache-2.0
// The sm90_mla kernels, run by the emulator, against double arithmetic: keys by boxes and row by
// row, of 16 bits and of 8, tiles of one block and more, cut and whole, without keys, shorter than
// planned, of one tensor or two, and logits that grow. Memory that must not be read is NaN.
#include "kernels/device/sm90/mla/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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
using Bits = std::vector<uint16_t>;

struct Latents {
  std::vector<int32_t> kv_lens;
  int32_t num_heads = 16;
  int32_t qo_len = 1;
  int32_t page_size = 64;  // 0: ragged
  int32_t num_ctas = 1;
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
  bool by_rows = false;                    // no maps
  bool aligned = true;
  bool has_tails = false;     // the last dims are in tensors of their own
  bool writes_pairs = false;  // o in 16 bits
  bool has_sinks = false;
  float growth = 1.0F;  // of keys from block to block
};

float value_of(uint16_t bits) { return Element<kBf16>::unpack(bits).x; }

/// Rows of bfloat16, NaN but where something is written.
struct Rows {
  Rows(int64_t num_rows, int32_t dims, int32_t gap)
      : stride(dims + gap), bits(static_cast<size_t>(num_rows * stride + 8), 0xffff) {}
  uint16_t& at(int64_t r, int32_t d) { return bits[static_cast<size_t>(r * stride + d)]; }
  int64_t stride;
  Bits bits;
};

/// A kernel, and tensors of a batch for it.
template <int32_t kQk, DType kKv>
class MlaBatch {
  static constexpr int32_t kVo = 512;
  static constexpr int32_t kTail = kQk - kVo;
  using Choices = device::Traits<kBf16, kKv, kQk, kVo, device::Standard>;
  using S = device::MlaShape<Choices>;

 public:
  explicit MlaBatch(const Latents& latents)
      : l_(latents), batch_(static_cast<int32_t>(latents.kv_lens.size())) {
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
      machine.run(1, 1, S::kThreads, [&] {
        if (threadIdx.x == 0) name_barriers();
        device::sm90_mla_kernel<Choices>(params_);
      });
    }
    for (const Arrivals& arrivals : arrivals_) {
      for (const int32_t counter : arrivals.counters) CHECK_EQ(counter, 0);
    }
  }
  float o(int64_t row, int32_t d) const {
    const auto i = static_cast<size_t>(row * kVo + d);
    return l_.writes_pairs ? value_of(reinterpret_cast<const uint16_t*>(o_.data())[i]) : o_[i];
  }
  const std::vector<float>& results() const { return o_; }

  /// The largest error of o and lse, in units of the largest value of a row.
  double error() const {
    double worst = 0;
    for (int32_t r = 0; r < batch_; ++r) {
      const int32_t kv_len = l_.kv_lens[static_cast<size_t>(r)];
      for (int32_t i = 0; i < l_.qo_len; ++i) {
        const int32_t count = std::max(0, kv_len - l_.qo_len + i + 1);
        for (int32_t h = 0; h < l_.num_heads; ++h) {
          worst =
              std::max(worst, error_of_row(r, (r * l_.qo_len + i) * l_.num_heads + h, h, count));
        }
      }
    }
    return worst;
  }

 private:
  /// So that a part of a slot that is filled before it is free is an error.
  static void name_barriers() {
    using Memory = device::MlaSharedMemory<S>;
    const device::MlaSmem<S> smem(*reinterpret_cast<Memory*>(device::smem));
    for (uint32_t i = 0; i < 2 * S::kSlots; ++i) {
      const auto part = static_cast<int>(i % 2);
      device::name_mbarriers("full", smem.full(i / 2, part).barrier, "empty",
                             smem.empty(i / 2, part), i);
    }
  }
  int32_t planned(int32_t r) const {
    const auto i = static_cast<size_t>(r);
    return l_.planned_lens.empty() ? l_.kv_lens[i] : l_.planned_lens[i];
  }
  int32_t page() const { return std::max(l_.page_size, 1); }
  int64_t kv_row(int32_t r, int32_t key) const {
    if (l_.page_size == 0) return first_rows_[static_cast<size_t>(r)] + key;
    return int64_t{pages_[static_cast<size_t>(r * most_pages_ + key / page())]} * page() +
           key % page();
  }

  void make_tensors() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const int32_t gap = l_.aligned ? 8 : 3;
    most_pages_ = 1;
    int32_t num_rows = 0;
    for (int32_t r = 0; r < batch_; ++r) {
      most_pages_ = std::max(most_pages_, (planned(r) + page() - 1) / page());
      first_rows_.push_back(num_rows);
      num_rows += planned(r) + 3;
    }
    if (l_.page_size > 0) {
      pages_.resize(static_cast<size_t>(most_pages_ * batch_));
      std::iota(pages_.begin(), pages_.end(), 0);
      std::shuffle(pages_.begin(), pages_.end(), random);
      num_rows = most_pages_ * batch_ * page();
    }
    const int32_t own_dims = l_.has_tails ? kVo : kQk;
    q_.emplace(int64_t{batch_} * l_.qo_len * l_.num_heads, own_dims, gap / 8 * 8);
    k_.emplace(num_rows, own_dims, gap);
    q_tail_.emplace(int64_t{batch_} * l_.qo_len * l_.num_heads, 64, gap / 8 * 8);
    k_tail_.emplace(num_rows, 64, gap);
    const int64_t row_bytes = kKv == DType::kFp8DsMla ? kDsMlaBytes : own_dims;
    key_bytes_.emplace(num_rows, row_bytes, l_.aligned ? 16 : 3);
    tail_bytes_.emplace(num_rows, kTail, l_.aligned ? 16 : 3);
    const auto fill = [&](Rows& rows, Rows& tail, int64_t row, float gain) {
      std::vector<float> numbers(kQk);
      for (float& x : numbers) x = normal(random) * gain;
      if (&rows == &*k_) write_bytes(row, numbers.data());
      for (int32_t d = 0; d < kQk; ++d) {
        const bool is_tail = l_.has_tails && d >= kVo;
        (is_tail ? tail.at(row, d - kVo) : rows.at(row, d)) =
            static_cast<uint16_t>(Element<kBf16>::pack(numbers[static_cast<size_t>(d)], 0.0F));
      }
    };
    for (int64_t row = 0; row < int64_t{batch_} * l_.qo_len * l_.num_heads; ++row) {
      fill(*q_, *q_tail_, row, 1.0F);
    }
    for (int32_t r = 0; r < batch_; ++r) {
      for (int32_t key = 0; key < l_.kv_lens[static_cast<size_t>(r)]; ++key) {
        const float gain = std::pow(l_.growth, static_cast<float>(key / 64));
        fill(*k_, *k_tail_, kv_row(r, key), gain);
      }
    }
    num_pages_ = l_.page_size > 0 ? most_pages_ * batch_ : 1;
    num_kv_rows_ = num_rows;
    o_.assign(static_cast<size_t>(batch_ * l_.qo_len * l_.num_heads) * kVo, NAN);
    lse_.assign(static_cast<size_t>(batch_ * l_.qo_len * l_.num_heads), NAN);
    sinks_.assign(static_cast<size_t>(l_.num_heads), 0.5F);
    // Behind the keys of a request are ids that are none, but for the page of its last key.
    for (int32_t r = 0; r < batch_ && l_.page_size > 0; ++r) {
      for (int32_t i = 0; i < most_pages_; ++i) {
        if (i * page() >= l_.kv_lens[static_cast<size_t>(r)]) {
          pages_[static_cast<size_t>(r * most_pages_ + i)] = 0x7fffffff;
        }
      }
    }
  }

  /// Of a key in a cache of 8 bits. Its numbers become those that the cache has.
  void write_bytes(int64_t row, float* numbers) {
    if constexpr (kKv == DType::kFp8DsMla) {
      narrow_ds_mla(numbers, key_bytes_->row(row));
    } else if constexpr (kKv == DType::kFloat8E4M3) {
      narrow(numbers, l_.has_tails ? kVo : kQk, 1.0F, key_bytes_->row(row));
      if (l_.has_tails) narrow(numbers + kVo, kTail, 1.0F, tail_bytes_->row(row));
    }
  }

  void schedule() {
    ScheduleShape shape;
    shape.group_size = l_.num_heads;
    shape.mask = {true, -1};
    shape.paged = l_.page_size > 0;
    shape.tile_q = S::kTileQ;
    shape.tile_kv = S::kTileKv;
    shape.num_ctas = l_.num_ctas;
    shape.max_partial_slots = 3 * l_.num_ctas;
    shape.item_steps = 16;
    shape.cost = {.tile = 10, .step = 200, .split = 10};  // cuts cost little: there are many
    std::vector<int32_t> qo_indptr(static_cast<size_t>(batch_) + 1);
    for (int32_t r = 0; r <= batch_; ++r) qo_indptr[static_cast<size_t>(r)] = r * l_.qo_len;
    std::vector<int32_t> lens;
    for (int32_t r = 0; r < batch_; ++r) lens.push_back(planned(r));
    std::vector<int32_t> kv_indptr = first_rows_;
    kv_indptr.push_back(num_kv_rows_);
    scheduler_.emplace(shape, batch_, batch_ * l_.qo_len);
    Batch batch = {qo_indptr.data(), lens.data(), nullptr, batch_};
    if (l_.page_size == 0) batch.kv_indptr = kv_indptr.data();
    scheduler_->make(batch);
    const Schedule& s = scheduler_->schedule();
    merges_.assign(static_cast<size_t>(s.first_merge), {});
    merges_.insert(merges_.end(), s.merges.begin(), s.merges.end());
    arrivals_.assign(merges_.size(), {});
    starts_.assign(static_cast<size_t>(l_.num_ctas), {});
    for (size_t c = 0; c < starts_.size(); ++c) {
      QueueStart& start = starts_[c];
      start.begin = s.cta_indptr[c];
      start.end = s.cta_indptr[c + 1];
      for (int32_t i = 0; i < std::min(start.end - start.begin, 2); ++i) {
        start.tiles[i] = s.tiles[static_cast<size_t>(start.begin + i)];
        start.segments[i] = s.segments[static_cast<size_t>(start.tiles[i].segment)];
      }
    }
    partial_o_.assign(static_cast<size_t>(s.num_partial_rows) * kVo + 4, NAN);
    partial_lse_.assign(static_cast<size_t>(s.num_partial_rows) + 1, NAN);
  }

  void make_params() {
    const Schedule& s = scheduler_->schedule();
    params_.schedule = {.tile_q = S::kTileQ,
                        .group_size = make_divisor(l_.num_heads),
                        .segments = s.segments.data(),
                        .tiles = s.tiles.data(),
                        .merges = merges_.data(),
                        .arrivals = arrivals_.data(),
                        .num_ctas = l_.num_ctas};
    TensorParams& t = params_.tensors;
    const auto view = [&](const Rows& rows, const ByteRows& bytes) {
      if (kKv != kBf16) return KvView{bytes.first, page() * bytes.stride, bytes.stride, 0};
      return KvView{rows.bits.data(), page() * rows.stride, rows.stride, 0};
    };
    t.k = t.v = view(*k_, *key_bytes_);
    if (l_.page_size > 0) {
      t.pages = {pages_.data(),        nullptr,    most_pages_,
                 make_divisor(page()), num_pages_, most_pages_};
    }
    if (!l_.planned_lens.empty()) t.kv_lens = l_.kv_lens.data();
    const int64_t heads = l_.num_heads;
    t.q = {q_->bits.data(), heads * q_->stride, q_->stride};
    t.o = {o_.data(), heads * kVo, kVo};
    t.lse = {lse_.data(), heads, 1};
    t.q_dtype = kBf16;
    t.kv_dtype = kKv;
    t.o_dtype = l_.writes_pairs ? kBf16 : DType::kFloat32;
    t.vectorized = l_.aligned;
    t.head_dim_qk = kQk;
    t.head_dim_vo = kVo;
    if (l_.has_tails) {
      params_.tails.q = {q_tail_->bits.data(), heads * q_tail_->stride, q_tail_->stride};
      params_.tails.q_dims = kTail;
      params_.tails.k = {view(*k_tail_, *tail_bytes_), kTail};
    }
    params_.mask = {true, -1};
    params_.variant.logits_scale = scale();
    params_.variant.v_scale = 0.75F;
    if (l_.has_sinks) params_.variant.sinks = {sinks_.data(), false};
    params_.workspace = {nullptr, 0, partial_o_.data(), partial_lse_.data()};
    make_maps();
  }

  /// Describes the tensors to the emulated TMA, as cuda/tensor_maps.cpp does to the real one.
  void make_maps() {
    using device::EmulatedMap;
    TensorMaps& maps = params_.maps;
    if (l_.by_rows) return;
    const auto put = [](TensorMap& map, const EmulatedMap& from) {
      std::memcpy(&map, &from, sizeof(from));
    };
    const int32_t heads = std::gcd(l_.num_heads, S::kTileQ);
    const auto of_queries = [&](Rows& rows, int32_t first, int64_t dims) {
      return EmulatedMap{&rows.at(0, first),
                         {{{dims, 1},
                           {l_.num_heads, rows.stride},
                           {batch_ * l_.qo_len, l_.num_heads * rows.stride}}},
                         {64, heads, 1, 1, 1}};
    };
    maps.has_q = true;
    maps.q_box_rows = heads;
    put(maps.q, of_queries(*q_, 0, kVo));
    if (kTail > 0) {
      put(maps.q_tail, of_queries(l_.has_tails ? *q_tail_ : *q_, l_.has_tails ? 0 : kVo, 64));
    }
    const int32_t divisor = l_.page_size | S::kTileKv;
    const int32_t rows = divisor & -divisor;
    if (l_.page_size == 0 || rows < 8 || kKv != kBf16) return;
    const auto of_keys = [&](Rows& keys, int32_t first, int64_t dims, int32_t blocks) {
      return EmulatedMap{&keys.at(0, first),
                         {{{64, 1},
                           {8, keys.stride},
                           {dims / 64, 64},
                           {page() / 8, 8 * keys.stride},
                           {num_pages_, page() * keys.stride}}},
                         {64, 8, blocks, rows / 8, 1}};
    };
    maps.has_kv = true;
    maps.box_rows = rows;
    put(maps.k, of_keys(*k_, 0, kVo, 4));
    if (kTail > 0) {
      put(maps.k_tail, of_keys(l_.has_tails ? *k_tail_ : *k_, l_.has_tails ? 0 : kVo, 64, 1));
    }
  }

  float scale() const { return 1.0F / std::sqrt(static_cast<float>(kQk)); }

  double error_of_row(int32_t r, int64_t row, int32_t head, int32_t num_keys) const {
    const auto element = [&](const Rows& rows, const Rows& tail, int64_t at, int32_t d) {
      const bool is_tail = l_.has_tails && d >= kVo;
      const Rows& own = is_tail ? tail : rows;
      return double{
          value_of(own.bits[static_cast<size_t>(at * own.stride + d - (is_tail ? kVo : 0))])};
    };
    std::vector<double> logits;
    double largest = l_.has_sinks ? 0.5 : -HUGE_VAL;
    for (int32_t key = 0; key < num_keys; ++key) {
      double x = 0;
      for (int32_t d = 0; d < kQk; ++d) {
        x += element(*q_, *q_tail_, row, d) * element(*k_, *k_tail_, kv_row(r, key), d);
      }
      logits.push_back(x * scale());
      largest = std::max(largest, logits.back());
    }
    (void)head;
    double sum = l_.has_sinks ? std::exp(0.5 - largest) : 0;
    std::vector<double> wanted(kVo, 0.0);
    for (int32_t key = 0; key < num_keys; ++key) {
      const double weight = std::exp(logits[static_cast<size_t>(key)] - largest);
      sum += weight;
      for (int32_t d = 0; d < kVo; ++d) {
        wanted[static_cast<size_t>(d)] += weight * element(*k_, *k_tail_, kv_row(r, key), d);
      }
    }
    const float lse = lse_[static_cast<size_t>(row)];
    if (sum == 0) return lse == -HUGE_VALF && o(row, 0) == 0 && o(row, 511) == 0 ? 0 : HUGE_VAL;
    if (std::isnan(lse)) return HUGE_VAL;
    double worst = std::fabs(lse - (largest + std::log(sum)));
    double size = 0.1;
    for (const double x : wanted) size = std::max(size, std::fabs(x / sum));
    for (int32_t d = 0; d < kVo; ++d) {
      const double got = o(row, d);
      const double x = 0.75 * wanted[static_cast<size_t>(d)] / sum;
      worst = std::max(worst, std::isnan(got) ? HUGE_VAL : std::fabs(got - x) / size);
    }
    return worst;
  }

  const Latents l_;
  const int32_t batch_;
  std::optional<Rows> q_, k_, q_tail_, k_tail_;
  std::optional<ByteRows> key_bytes_, tail_bytes_;  // instead of k_ and k_tail_
  std::vector<int32_t> pages_;
  std::vector<int32_t> first_rows_;  // of ragged keys
  int32_t most_pages_ = 0;           // of a request
  int32_t num_pages_ = 1;            // of the cache
  int32_t num_kv_rows_ = 0;
  std::vector<float> o_, lse_, partial_o_, partial_lse_, sinks_;
  std::optional<OwningScheduler> scheduler_;
  std::vector<Merge> merges_;
  std::vector<Arrivals> arrivals_;
  std::vector<QueueStart> starts_;
  AttentionParams params_;
};

template <int32_t kQk = 576, DType kKv = kBf16>
void check(const Latents& latents, const char* what) {
  MlaBatch<kQk, kKv> batch(latents);
  std::vector<int32_t> order(static_cast<size_t>(latents.num_ctas));
  std::iota(order.begin(), order.end(), 0);
  batch.run(order);
  const double error = batch.error();
  if (!(error < 0.02)) {
    check::fail(__FILE__, __LINE__, std::string(what) + ": error " + std::to_string(error));
  }
  if (latents.num_ctas == 1) return;
  const std::vector<float> first = batch.results();
  std::reverse(order.begin(), order.end());
  batch.run(order);
  if (std::memcmp(first.data(), batch.results().data(), first.size() * 4) != 0) {
    check::fail(__FILE__, __LINE__, std::string(what) + ": other bits in another order");
  }
}

TEST(blocks_of_a_tile) {
  for (const int32_t kv_len : {1, 64, 65, 128, 192, 250}) {
    check({.kv_lens = {kv_len}}, "one tile");
  }
  check({.kv_lens = {64, 130, 1, 0, 192}, .writes_pairs = true}, "many tiles");
  check({.kv_lens = {130, 70}, .num_heads = 96}, "tiles across tokens");
}
TEST(pages) {
  for (const int32_t page_size : {0, 1, 5, 8, 16, 24, 128}) {
    check({.kv_lens = {150, 70}, .qo_len = 3, .page_size = page_size}, "pages");
  }
  check({.kv_lens = {150, 70}, .by_rows = true, .writes_pairs = true}, "no maps");
  check({.kv_lens = {150, 70}, .by_rows = true, .aligned = false}, "not aligned");
  check({.kv_lens = {90}, .page_size = 16, .has_tails = true}, "two tensors");
  check({.kv_lens = {90}, .page_size = 1, .by_rows = true, .has_tails = true}, "two tensors");
}
TEST(cut_tiles) {
  check({.kv_lens = {700}, .num_heads = 12, .num_ctas = 4, .has_sinks = true}, "pieces");
  check({.kv_lens = {500}, .num_heads = 3, .num_ctas = 4}, "merges of few rows");
  check({.kv_lens = {330, 0, 70}, .num_heads = 40, .qo_len = 2, .num_ctas = 3}, "several tiles");
  check({.kv_lens = {330, 40}, .num_ctas = 5, .planned_lens = {1500, 200}}, "pieces without keys");
}
TEST(logits_that_grow) {
  check({.kv_lens = {450}, .growth = 2.0F}, "growing");
  check({.kv_lens = {450}, .num_ctas = 2, .growth = 0.5F}, "shrinking");
}
template <DType kKv>
void check_8_bits() {
  for (const int32_t page_size : {0, 1, 5, 16, 64, 128}) {
    check<576, kKv>({.kv_lens = {150, 64, 70}, .qo_len = 3, .page_size = page_size}, "pages");
  }
  for (const int32_t kv_len : {1, 64, 65, 128, 250}) {
    check<576, kKv>({.kv_lens = {kv_len, 0, kv_len}, .writes_pairs = true}, "tiles");
  }
  check<576, kKv>({.kv_lens = {150, 70}, .page_size = 16, .by_rows = true, .aligned = false},
                  "not aligned");
  check<576, kKv>({.kv_lens = {700}, .num_heads = 12, .num_ctas = 4, .has_sinks = true}, "pieces");
  check<576, kKv>({.kv_lens = {330, 0, 70}, .num_heads = 40, .qo_len = 2, .num_ctas = 3}, "cut");
  check<576, kKv>({.kv_lens = {330, 40}, .num_ctas = 5, .planned_lens = {1500, 200}}, "shorter");
  check<576, kKv>({.kv_lens = {450}, .num_ctas = 2, .growth = 1.5F}, "growing");
}
TEST(keys_of_8_bits) {
  check_8_bits<DType::kFloat8E4M3>();
  check_8_bits<DType::kFp8DsMla>();
  for (const int32_t page_size : {1, 64}) {
    check<576, DType::kFloat8E4M3>(
        {.kv_lens = {90, 200}, .page_size = page_size, .has_tails = true}, "two tensors");
    check<512, DType::kFloat8E4M3>({.kv_lens = {90, 200}, .page_size = page_size}, "no tail");
  }
}
TEST(whole_rows_as_values) {
  check<512>({.kv_lens = {150, 64}, .page_size = 16}, "boxes");
  check<512>({.kv_lens = {150, 64}, .page_size = 3}, "rows");
}

}  // namespace
}  // namespace flashplan::test
