// SPDX-License-Identifier: Apache-2.0
// The sm90_wide kernels, run by the emulator, against double arithmetic: pages and ragged keys, by
// boxes and row by row, masks, windows, softcap, sinks, several kv heads, cut tiles, lengths that
// are shorter than planned, fewer dims than the kernel's, and logits that grow. CTAs run at the
// same time, and their warps in a random order. Memory that must not be read is NaN.
#include "kernels/device/sm90/wide/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "kernels/device/traits.h"
#include "owning_scheduler.h"

namespace flashplan::test {
namespace {

using device::Element;
constexpr float kSink = 0.5F;
constexpr float kVScale = 0.75F;
constexpr float kSoftcap = 3.0F;

struct Requests {
  std::vector<int32_t> qo_lens;
  std::vector<int32_t> kv_lens;
  int32_t group_size = 1;
  int32_t num_kv_heads = 1;
  int32_t page_size = 0;  // 0: ragged
  int32_t num_ctas = 2;
  int32_t head_dim_qk = 512;
  int32_t head_dim_vo = 512;
  int32_t tail_dims = 0;  // of ragged keys, in a tensor that all heads share
  int32_t window_left = -1;
  bool causal = true;
  bool has_mask = false;  // random bits
  bool by_rows = false;   // no maps
  bool aligned = true;
  bool writes_floats = false;
  bool has_sinks = false;
  bool has_k_scales = false;
  int32_t missing_page = -1;               // a page of request 0 that the cache does not have
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
  float growth = 1.0F;                     // of keys from 64 to 64
};

/// Rows of 16-bit numbers with gaps, which are NaN, as what nobody has written.
struct Rows {
  Rows(int64_t num_rows, int64_t dims, bool aligned)
      : stride((dims + 7) / 8 * 8 + (aligned ? 8 : 3)),
        memory(static_cast<size_t>(num_rows * stride + 128), 0xffff) {}
  uint16_t* data() {
    const auto address = (reinterpret_cast<uintptr_t>(memory.data()) + 127) & ~uintptr_t{127};
    return reinterpret_cast<uint16_t*>(address);
  }
  uint16_t& at(int64_t row, int64_t dim) { return data()[row * stride + dim]; }
  int64_t stride;
  std::vector<uint16_t> memory;
};

/// A kernel, and tensors of a batch for it.
template <DType kDType, typename Variant>
class WideBatch {
  static constexpr int kDims = 512;
  static constexpr int64_t kOutputStride = kDims + 8;
  static constexpr bool kCaps = std::is_same_v<Variant, device::Softcap>;
  using Choices = device::Traits<kDType, kDType, kDims, kDims, Variant>;
  using S = device::WideShape<Choices>;

 public:
  explicit WideBatch(const Requests& requests)
      : r_(requests), batch_(static_cast<int32_t>(requests.kv_lens.size())) {
    for (int32_t r = 0; r < batch_; ++r) {
      first_tokens_.push_back(first_tokens_.back() + r_.qo_lens[static_cast<size_t>(r)]);
      first_keys_.push_back(first_keys_.back() + planned(r) + 3);
      most_pages_ = std::max(most_pages_, (planned(r) + page() - 1) / page());
    }
    make_tensors();
    schedule();
    make_params();
  }

  std::vector<float> run(unsigned seed) {
    std::memset(o_.data(), 0xff, o_.size() * 4);
    std::fill(lse_.begin(), lse_.end(), NAN);
    static simt::Machine machine;
    simt::shuffles_warps = true;
    simt::first_random = seed;
    machine.run(static_cast<unsigned>(r_.num_ctas), r_.num_ctas, S::kThreads, [&] {
      if (threadIdx.x == 0) {
        std::memset(device::smem, 0xff, sizeof(device::smem));
        device::copy_engine().random.seed(seed + blockIdx.x);
        device::reset_named_barriers();
        device::mbarrier_facts().clear();
        name_barriers();
      }
      device::sm90_wide_kernel<Choices>(params_);
    });
    for (const Arrivals& arrivals : arrivals_) {
      for (const int32_t counter : arrivals.counters) CHECK_EQ(counter, 0);
    }
    for (int64_t row = 0; row < int64_t{first_tokens_.back()} * heads(); ++row) {
      for (int32_t d = r_.head_dim_vo; d < kOutputStride; ++d) CHECK(std::isnan(o(row, d)));
    }
    return o_;
  }

  /// The largest error of o and lse, in units of the largest value of a row.
  double error() {
    double worst = 0;
    for (int32_t r = 0; r < batch_; ++r) {
      for (int32_t i = 0; i < r_.qo_lens[static_cast<size_t>(r)]; ++i) {
        for (int32_t h = 0; h < heads(); ++h) worst = std::max(worst, error_of_row(r, i, h));
      }
    }
    return worst;
  }

 private:
  static float value_of(uint16_t bits) { return Element<kDType>::unpack(bits).x; }
  int32_t heads() const { return r_.num_kv_heads * r_.group_size; }
  int32_t page() const { return std::max(r_.page_size, 1); }
  int32_t planned(int32_t r) const {
    const auto i = static_cast<size_t>(r);
    return r_.planned_lens.empty() ? r_.kv_lens[i] : r_.planned_lens[i];
  }
  /// The row of a key in K and V, but for their heads.
  int64_t kv_row(int32_t r, int32_t key) const {
    if (r_.page_size == 0) return first_keys_[static_cast<size_t>(r)] + key;
    const int32_t id = pages_[static_cast<size_t>(r * most_pages_ + key / page())];
    return int64_t{id} * page() + key % page();
  }
  int32_t own_dims() const { return r_.head_dim_qk - r_.tail_dims; }
  float k_scale(int32_t kv_head) const {
    return r_.has_k_scales ? k_scales_[static_cast<size_t>(kv_head)] : 1.0F;
  }

  void name_barriers() const {
    const device::MlaSmem<S> smem(reinterpret_cast<device::MlaSharedMemory<S>&>(device::smem));
    for (uint32_t block = 0; block < S::kSlots; ++block) {
      for (int part = 0; part < 2; ++part) {
        const uint32_t index = block * 2 + static_cast<uint32_t>(part);
        device::name_mbarriers("keys_full", smem.full(block, part).barrier, "keys_empty",
                               smem.empty(block, part), index);
        device::name_mbarriers("values_full", smem.values_full(block, part).barrier, "values_empty",
                               smem.values_empty(block, part), index);
      }
    }
    for (uint32_t i = 0; i < S::kContexts; ++i) {
      device::name_mbarriers("context_full", smem.context_full(i), "context_empty",
                             smem.context_empty(i), i);
    }
    simt::describe_waits = device::describe_mbarriers;
  }

  void make_tensors() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const bool is_paged = r_.page_size > 0;
    num_pages_ = is_paged ? most_pages_ * batch_ : 1;
    const int64_t num_rows = is_paged ? int64_t{num_pages_} * page() : first_keys_.back();
    if (is_paged) {
      pages_.resize(static_cast<size_t>(num_pages_));
      std::iota(pages_.begin(), pages_.end(), 0);
      std::shuffle(pages_.begin(), pages_.end(), random);
    }
    const int64_t tokens = first_tokens_.back();
    q_.emplace(tokens * heads(), r_.head_dim_qk, true);
    k_.emplace(num_rows * r_.num_kv_heads, own_dims(), r_.aligned);
    tail_.emplace(num_rows, r_.tail_dims, true);
    v_.emplace(num_rows * r_.num_kv_heads, r_.head_dim_vo, r_.aligned);
    const auto fill = [&](Rows& rows, int64_t row, int32_t dims, float gain) {
      for (int32_t d = 0; d < dims; ++d) {
        rows.at(row, d) = static_cast<uint16_t>(Element<kDType>::pack(normal(random) * gain, 0.0F));
      }
    };
    for (int64_t row = 0; row < tokens * heads(); ++row) fill(*q_, row, r_.head_dim_qk, 1.0F);
    for (int32_t r = 0; r < batch_; ++r) {
      for (int32_t key = 0; key < r_.kv_lens[static_cast<size_t>(r)]; ++key) {
        if (r == 0 && r_.missing_page >= 0 && key / page() == r_.missing_page) continue;
        const float gain = std::pow(r_.growth, static_cast<float>(key / 64));
        fill(*tail_, kv_row(r, key), r_.tail_dims, gain);
        for (int32_t h = 0; h < r_.num_kv_heads; ++h) {
          fill(*k_, kv_row(r, key) * r_.num_kv_heads + h, own_dims(), gain);
          fill(*v_, kv_row(r, key) * r_.num_kv_heads + h, r_.head_dim_vo, 1.0F);
        }
      }
    }
    o_.assign(static_cast<size_t>(tokens * heads() * kOutputStride) + 8, NAN);
    lse_.assign(static_cast<size_t>(tokens * heads()) + 1, NAN);
    mask_words_ = most_pages_ * page() / 32 + 1;
    for (int64_t i = 0; i < tokens * mask_words_; ++i) mask_.push_back(random() | random());
    mask_begins_.assign(static_cast<size_t>(batch_), 0);
    sinks_.assign(static_cast<size_t>(heads()), kSink);
    for (int32_t h = 0; h < r_.num_kv_heads; ++h) {
      k_scales_.push_back(0.5F + 0.25F * static_cast<float>(h));
    }
    // Behind the keys of a request are ids that are none.
    for (int32_t r = 0; r < batch_ && is_paged; ++r) {
      for (int32_t i = 0; i < most_pages_; ++i) {
        const bool is_missing = r == 0 && i == r_.missing_page;
        if (i * page() >= r_.kv_lens[static_cast<size_t>(r)] || is_missing) {
          pages_[static_cast<size_t>(r * most_pages_ + i)] = 0x7fffffff;
        }
      }
    }
  }

  void schedule() {
    ScheduleShape shape;
    shape.num_kv_heads = r_.num_kv_heads;
    shape.group_size = r_.group_size;
    shape.mask = {r_.causal, r_.window_left};
    shape.paged = r_.page_size > 0;
    shape.tile_q = S::kTileQ;
    shape.tile_kv = S::kTileKv;
    shape.num_ctas = r_.num_ctas;
    shape.max_partial_slots = 3 * r_.num_ctas;
    shape.item_steps = 16;
    shape.uncut_part = 16;
    shape.cost = {.tile = 10, .step = 200, .split = 10};  // cuts cost little: there are many
    std::vector<int32_t> lens;
    for (int32_t r = 0; r < batch_; ++r) lens.push_back(planned(r));
    Batch batch = {first_tokens_.data(), lens.data(), nullptr, batch_};
    if (r_.page_size == 0) batch.kv_indptr = first_keys_.data();
    scheduler_.emplace(shape, batch_, first_tokens_.back());
    scheduler_->make(batch);
    const Schedule& s = scheduler_->schedule();
    merges_.assign(static_cast<size_t>(s.first_merge), {});
    merges_.insert(merges_.end(), s.merges.begin(), s.merges.end());
    arrivals_.assign(merges_.size() + 1, {});
    partial_o_.assign(static_cast<size_t>(s.num_partial_rows) * kDims / 4 + 1,
                      {NAN, NAN, NAN, NAN});
    partial_lse_.assign(static_cast<size_t>(s.num_partial_rows) + 1, NAN);
    starts_.assign(static_cast<size_t>(r_.num_ctas), {});
    for (size_t c = 0; c < starts_.size(); ++c) {
      QueueStart& start = starts_[c];
      start.begin = s.cta_indptr[c];
      start.end = s.cta_indptr[c + 1];
      for (int32_t i = 0; i < std::min(start.end - start.begin, 2); ++i) {
        start.tiles[i] = s.tiles[static_cast<size_t>(start.begin + i)];
        start.segments[i] = s.segments[static_cast<size_t>(start.tiles[i].segment)];
      }
    }
  }

  void make_params() {
    const Schedule& s = scheduler_->schedule();
    params_.schedule = {.starts = starts_.data(),
                        .tile_q = S::kTileQ,
                        .group_size = make_divisor(r_.group_size),
                        .segments = s.segments.data(),
                        .tiles = s.tiles.data(),
                        .merges = merges_.data(),
                        .arrivals = arrivals_.data(),
                        .mask_begins = mask_begins_.data(),
                        .num_ctas = r_.num_ctas};
    TensorParams& t = params_.tensors;
    if (r_.has_mask) t.mask = {true, static_cast<int32_t>(mask_words_), mask_.data(), mask_words_};
    if (r_.tail_dims > 0) {
      t.has_key_tail = true;
      params_.tails.k = {{tail_->data(), 0, tail_->stride, 0}, r_.tail_dims};
    }
    const auto view = [&](Rows& rows) {
      const int64_t token = r_.num_kv_heads * rows.stride;
      return KvView{rows.data(), page() * token, token, rows.stride};
    };
    if (r_.page_size > 0) {
      t.pages = {pages_.data(),        nullptr,    most_pages_,
                 make_divisor(page()), num_pages_, most_pages_};
    }
    if (!r_.planned_lens.empty()) t.kv_lens = r_.kv_lens.data();
    t.q = {q_->data(), heads() * q_->stride, q_->stride};
    t.k = view(*k_);
    t.v = view(*v_);
    t.o = {o_.data(), heads() * kOutputStride, kOutputStride};
    t.lse = {lse_.data(), heads(), 1};
    t.q_dtype = t.kv_dtype = kDType;
    t.o_dtype = r_.writes_floats ? DType::kFloat32 : kDType;
    t.vectorized = is_vectorized();
    t.head_dim_qk = r_.head_dim_qk;
    t.head_dim_vo = r_.head_dim_vo;
    params_.mask = {r_.causal, r_.window_left};
    params_.variant.logits_scale = scale();
    if (kCaps) params_.variant.softcap = kSoftcap;
    params_.variant.v_scale = kVScale;
    if (r_.has_sinks) params_.variant.sinks = {sinks_.data(), false};
    if (r_.has_k_scales) params_.variant.k_scales = {k_scales_.data(), 1};
    params_.workspace = {nullptr, 0, &partial_o_.data()->x, partial_lse_.data()};
    if (!r_.by_rows && is_vectorized()) make_maps();
  }
  bool is_vectorized() const {
    return r_.aligned && r_.head_dim_qk % 8 == 0 && r_.head_dim_vo % 8 == 0;
  }

  /// Describes the tensors to the emulated TMA, as cuda/tensor_maps.cpp does to the real one.
  void make_maps() {
    using device::EmulatedMap;
    TensorMaps& maps = params_.maps;
    const auto put = [](TensorMap& map, const EmulatedMap& from) {
      std::memcpy(&map, &from, sizeof(from));
    };
    maps.has_q = S::kTileQ % r_.group_size == 0;
    put(maps.q, {q_->data(),
                 {{{r_.head_dim_qk, 1},
                   {heads(), q_->stride},
                   {first_tokens_.back(), heads() * q_->stride}}},
                 {64, r_.group_size, S::kTileQ / r_.group_size, 1, 1}});
    const int32_t divisor = r_.page_size | S::kTileKv;
    const int32_t rows = divisor & -divisor;
    const bool has_whole_blocks = r_.head_dim_qk % 64 == 0 && r_.head_dim_vo % 64 == 0;
    if (!has_whole_blocks || r_.tail_dims > 0 || rows < 8) return;
    const bool is_paged = r_.page_size > 0;
    const auto of_rows = [&](Rows& from, int32_t dims) {
      const int64_t token = r_.num_kv_heads * from.stride;
      const int64_t num_slabs = int64_t{is_paged ? num_pages_ * page() : 1} * r_.num_kv_heads;
      return EmulatedMap{from.data(),
                         {{{64, 1},
                           {is_paged ? 8 : first_keys_.back(), token},
                           {dims / 64, 64},
                           {(is_paged ? page() : rows) / 8, 8 * token},
                           {num_slabs, from.stride}}},
                         {64, 8, 4, rows / 8, 1}};
    };
    maps.has_kv = true;
    maps.has_all_blocks = true;
    maps.box_rows = rows;
    maps.num_kv_tokens = is_paged ? 0 : first_keys_.back();
    maps.k_slabs_per_page = maps.v_slabs_per_page = page() * r_.num_kv_heads;
    put(maps.k, of_rows(*k_, r_.head_dim_qk));
    put(maps.v, of_rows(*v_, r_.head_dim_vo));
  }

  float scale() const { return 2.0F / std::sqrt(static_cast<float>(r_.head_dim_qk)); }
  double o(int64_t row, int32_t d) const {
    const auto i = static_cast<size_t>(row * kOutputStride + d);
    if (r_.writes_floats) return o_[i];
    return value_of(reinterpret_cast<const uint16_t*>(o_.data())[i]);
  }

  double error_of_row(int32_t r, int32_t query, int32_t head) {
    const int32_t kv_len = r_.kv_lens[static_cast<size_t>(r)];
    const int32_t position = kv_len - r_.qo_lens[static_cast<size_t>(r)] + query;
    const int64_t row = int64_t{first_tokens_[static_cast<size_t>(r)] + query} * heads() + head;
    const int32_t kv_head = head / r_.group_size;
    const int32_t end = r_.causal ? position + 1 : kv_len;
    const int32_t begin = r_.window_left < 0 ? 0 : std::max(position - r_.window_left, 0);
    std::vector<int32_t> keys;
    std::vector<double> logits;
    double largest = r_.has_sinks ? kSink : -HUGE_VAL;
    for (int32_t key = begin; key < end; ++key) {
      if (r == 0 && r_.missing_page >= 0 && key / page() == r_.missing_page) continue;
      const auto word = static_cast<size_t>(row / heads() * mask_words_ + key / 32);
      if (r_.has_mask && (mask_[word] >> key % 32 & 1) == 0) continue;
      const int64_t at = kv_row(r, key) * r_.num_kv_heads + kv_head;
      double x = 0;
      for (int32_t d = 0; d < r_.head_dim_qk; ++d) {
        const bool is_own = d < own_dims();
        const uint16_t of_key = is_own ? k_->at(at, d) : tail_->at(kv_row(r, key), d - own_dims());
        x += double{value_of(q_->at(row, d))} * value_of(of_key);
      }
      x *= scale() * k_scale(kv_head);
      keys.push_back(key);
      logits.push_back(kCaps ? kSoftcap * std::tanh(x / kSoftcap) : x);
      largest = std::max(largest, logits.back());
    }
    double sum = r_.has_sinks ? std::exp(kSink - largest) : 0;
    std::vector<double> wanted(static_cast<size_t>(r_.head_dim_vo), 0.0);
    for (size_t i = 0; i < keys.size(); ++i) {
      const int64_t at = kv_row(r, keys[i]) * r_.num_kv_heads + kv_head;
      const double weight = std::exp(logits[i] - largest);
      sum += weight;
      for (int32_t d = 0; d < r_.head_dim_vo; ++d) {
        wanted[static_cast<size_t>(d)] += weight * value_of(v_->at(at, d));
      }
    }
    const float lse = lse_[static_cast<size_t>(row)];
    const int32_t last = r_.head_dim_vo - 1;
    if (sum == 0) return lse == -HUGE_VALF && o(row, 0) == 0 && o(row, last) == 0 ? 0 : HUGE_VAL;
    if (std::isnan(lse)) return HUGE_VAL;
    double worst = std::fabs(lse - (largest + std::log(sum)));
    double size = 0.1;
    for (const double x : wanted) size = std::max(size, std::fabs(x / sum));
    for (int32_t d = 0; d < r_.head_dim_vo; ++d) {
      const double error = std::fabs(o(row, d) - kVScale * wanted[static_cast<size_t>(d)] / sum);
      worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error / size);
    }
    return worst;
  }

  const Requests r_;
  const int32_t batch_;
  std::vector<int32_t> first_tokens_ = {0};
  std::vector<int32_t> first_keys_ = {0};
  int32_t most_pages_ = 1;  // of a request
  int32_t num_pages_ = 1;   // of the cache
  std::vector<int32_t> pages_;
  std::optional<Rows> q_, k_, v_, tail_;
  std::vector<uint32_t> mask_;
  int64_t mask_words_ = 0;  // of a token
  std::vector<int32_t> mask_begins_;
  std::vector<float> o_, lse_, partial_lse_, sinks_, k_scales_;
  std::vector<float4> partial_o_;
  std::optional<OwningScheduler> scheduler_;
  std::vector<Merge> merges_;
  std::vector<Arrivals> arrivals_;
  std::vector<QueueStart> starts_;
  AttentionParams params_;
};

/// Runs a batch twice, with warps in different orders.
template <DType kDType = DType::kBFloat16, typename Variant = device::Standard>
void check(const Requests& requests, const char* what) {
  WideBatch<kDType, Variant> batch(requests);
  const std::vector<float> first = batch.run(1);
  const double error = batch.error();
  if (!(error < 0.02)) {
    check::fail(__FILE__, __LINE__, std::string(what) + ": error " + std::to_string(error));
  }
  const std::vector<float> second = batch.run(2);
  if (std::memcmp(first.data(), second.data(), first.size() * 4) != 0) {
    check::fail(__FILE__, __LINE__, std::string(what) + ": other bits in another order");
  }
}

TEST(blocks_of_a_tile) {
  for (const int32_t kv_len : {1, 64, 65, 128, 192, 250}) {
    check({.qo_lens = {1}, .kv_lens = {kv_len}, .num_ctas = 1}, "one tile");
  }
  check({.qo_lens = {70, 3, 5, 0}, .kv_lens = {130, 3, 64, 40}, .group_size = 2}, "many tiles");
}
TEST(pages) {
  for (const int32_t page_size : {8, 16, 24, 64, 128}) {
    check({.qo_lens = {40, 3}, .kv_lens = {150, 70}, .group_size = 2, .page_size = page_size},
          "boxes");
  }
  check({.qo_lens = {20, 3}, .kv_lens = {150, 70}, .page_size = 5}, "small pages");
  check({.qo_lens = {20}, .kv_lens = {150}, .page_size = 16, .missing_page = 2}, "a missing page");
}
TEST(rows) {
  check({.qo_lens = {20, 9}, .kv_lens = {150, 70}, .page_size = 16, .by_rows = true}, "no maps");
  check({.qo_lens = {20, 9}, .kv_lens = {150, 70}, .by_rows = true}, "no maps");
  check({.qo_lens = {20}, .kv_lens = {90}, .aligned = false, .writes_floats = true}, "not aligned");
  check({.qo_lens = {20}, .kv_lens = {90}, .group_size = 3}, "groups of 3");
  check({.qo_lens = {20}, .kv_lens = {90}, .num_kv_heads = 2, .tail_dims = 72},
        "keys in two parts");
  check({.qo_lens = {20}, .kv_lens = {90}, .head_dim_qk = 511, .head_dim_vo = 257}, "odd dims");
}
TEST(heads) {
  check({.qo_lens = {10, 70},
         .kv_lens = {90, 200},
         .group_size = 2,
         .num_kv_heads = 3,
         .page_size = 16,
         .has_k_scales = true},
        "heads of pages");
  check({.qo_lens = {10, 0, 3}, .kv_lens = {90, 5, 3}, .num_kv_heads = 4, .has_sinks = true},
        "heads of ragged keys");
}
TEST(masks) {
  check({.qo_lens = {70}, .kv_lens = {130}, .causal = false}, "full");
  check({.qo_lens = {70}, .kv_lens = {300}, .page_size = 16, .window_left = 50}, "a window");
  check({.qo_lens = {70}, .kv_lens = {300}, .window_left = 100}, "a window of ragged keys");
  check({.qo_lens = {70, 5}, .kv_lens = {200, 90}, .page_size = 16, .has_mask = true}, "bits");
  check<DType::kBFloat16, device::Softcap>({.qo_lens = {70}, .kv_lens = {150}, .page_size = 16},
                                           "softcap");
}
TEST(cut_tiles) {
  check({.qo_lens = {6}, .kv_lens = {700}, .group_size = 2, .num_ctas = 4, .has_sinks = true},
        "pieces");
  check({.qo_lens = {3}, .kv_lens = {500}, .num_kv_heads = 2, .page_size = 16, .num_ctas = 4},
        "merges of few rows");
  check({.qo_lens = {70, 2, 5}, .kv_lens = {330, 0, 70}, .num_kv_heads = 2, .num_ctas = 3},
        "several tiles");
  check({.qo_lens = {4, 4},
         .kv_lens = {330, 40},
         .page_size = 16,
         .num_ctas = 5,
         .planned_lens = {1500, 200}},
        "pieces without keys");
}
TEST(fewer_dims) {
  for (const int32_t dims : {320, 384, 448}) {
    check({.qo_lens = {20},
           .kv_lens = {150},
           .page_size = 16,
           .num_ctas = 1,
           .head_dim_qk = dims,
           .head_dim_vo = dims},
          "whole blocks");
  }
  check({.qo_lens = {20}, .kv_lens = {150}, .num_ctas = 4, .head_dim_qk = 384, .head_dim_vo = 320},
        "different dims");
  check(
      {.qo_lens = {20}, .kv_lens = {150}, .num_ctas = 1, .head_dim_vo = 128, .writes_floats = true},
      "a half");
}
TEST(logits_that_grow) {
  check({.qo_lens = {3}, .kv_lens = {450}, .num_ctas = 1, .growth = 2.0F}, "growing");
  check({.qo_lens = {3}, .kv_lens = {450}, .growth = 0.5F}, "shrinking");
}
TEST(float16) {
  check<DType::kFloat16>({.qo_lens = {70}, .kv_lens = {150}, .page_size = 16}, "float16");
}

}  // namespace
}  // namespace flashplan::test
