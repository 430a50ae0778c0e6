// SPDX-License-Identifier: Apache-2.0
// The sm90 kernels for ragged keys whose last dims are in a tensor of their own, run by the
// emulator, against double arithmetic: by boxes and row by row. CTAs run at the same time, and
// their warps in a random order. Memory that must not be read is NaN.
#include "kernels/device/sm90/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/device/traits.h"
#include "owning_scheduler.h"

namespace flashplan::test {
namespace {

using device::Element;
constexpr DType kBf16 = DType::kBFloat16;

struct Requests {
  std::vector<int32_t> qo_lens;
  std::vector<int32_t> kv_lens;
  int32_t num_kv_heads = 2;
  int32_t num_ctas = 3;
  int32_t head_dim_qk = 192;
  int32_t head_dim_vo = 128;
  int32_t tail_dims = 64;
  bool by_rows = false;  // no maps
  int32_t window_left = -1;
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
};

float value_of(uint16_t bits) { return Element<kBf16>::unpack(bits).x; }

/// Rows of bfloat16 with gaps, which are NaN, as what nobody has written.
struct Rows {
  Rows(int64_t num_rows, int64_t dims, bool aligned)
      : stride((dims + 7) / 8 * 8 + (aligned ? 8 : 3)),
        memory(static_cast<size_t>(num_rows * stride + 128), 0xffff) {}
  uint16_t* data() {
    const auto address = (reinterpret_cast<uintptr_t>(memory.data()) + 127) & ~uintptr_t{127};
    return reinterpret_cast<uint16_t*>(address);
  }
  uint16_t& at(int64_t row, int64_t dim) { return data()[row * stride + dim]; }
  void fill(int64_t row, int32_t dims, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int32_t d = 0; d < dims; ++d) {
      at(row, d) = static_cast<uint16_t>(Element<kBf16>::pack(normal(random), 0.0F));
    }
  }
  int64_t stride;
  std::vector<uint16_t> memory;
};

/// A kernel of kQk and kVo dims, and tensors of a batch for it.
template <int kQk, int kVo>
class TailBatch {
  struct Choices : device::Traits<kBf16, kBf16, kQk, kVo, device::Standard> {
    static constexpr bool kHasKeyTail = true;
  };
  using S = device::Sm90Shape<Choices>;

 public:
  explicit TailBatch(const Requests& requests)
      : r_(requests), batch_(static_cast<int32_t>(requests.kv_lens.size())) {
    for (int32_t r = 0; r < batch_; ++r) {
      first_tokens_.push_back(first_tokens_.back() + r_.qo_lens[static_cast<size_t>(r)]);
      first_keys_.push_back(first_keys_.back() + planned(r) + 3);
    }
    make_tensors();
    schedule();
    make_params();
  }

  std::vector<uint16_t> run(unsigned seed) {
    o_->memory.assign(o_->memory.size(), 0xffff);
    static simt::Machine machine;
    simt::shuffles_warps = true;
    simt::first_random = seed;
    machine.run(static_cast<unsigned>(r_.num_ctas), r_.num_ctas, S::kThreads, [&] {
      if (threadIdx.x == 0) {
        std::memset(device::smem, 0xff, sizeof(device::smem));
        device::copy_engine().random.seed(seed + blockIdx.x);
        device::reset_named_barriers();
        device::mbarrier_facts().clear();
      }
      device::sm90_attention_kernel<Choices>(params_);
      device::bulk_store_wait();
    });
    for (const Arrivals& arrivals : arrivals_) {
      for (const int32_t counter : arrivals.counters) CHECK_EQ(counter, 0);
    }
    return o_->memory;
  }

  /// The largest error of o and lse, in units of the largest value of a row.
  double error() {
    double worst = 0;
    for (int32_t r = 0; r < batch_; ++r) {
      const auto i = static_cast<size_t>(r);
      for (int32_t token = 0; token < r_.qo_lens[i]; ++token) {
        for (int32_t h = 0; h < r_.num_kv_heads; ++h) {
          const int32_t last = r_.kv_lens[i] - r_.qo_lens[i] + token;
          worst = std::max(worst, error_of_row(r, first_tokens_[i] + token, h, last));
        }
      }
    }
    return worst;
  }

 private:
  int32_t planned(int32_t r) const {
    const auto i = static_cast<size_t>(r);
    return r_.planned_lens.empty() ? r_.kv_lens[i] : r_.planned_lens[i];
  }
  int32_t own_dims() const { return r_.head_dim_qk - r_.tail_dims; }
  bool is_aligned() const { return own_dims() % 8 == 0 && r_.tail_dims % 8 == 0; }

  void make_tensors() {
    std::mt19937 random(5);
    const int64_t heads = r_.num_kv_heads;
    const int64_t keys = first_keys_.back();
    const int64_t tokens = first_tokens_.back();
    q_.emplace(tokens * heads, r_.head_dim_qk, true);
    k_.emplace(keys * heads, own_dims(), is_aligned());
    tail_.emplace(keys, r_.tail_dims, is_aligned());
    v_.emplace(keys * heads, r_.head_dim_vo, is_aligned());
    o_.emplace(tokens * heads, r_.head_dim_vo, true);
    lse_.assign(static_cast<size_t>(tokens * heads), NAN);
    for (int64_t row = 0; row < tokens * heads; ++row) q_->fill(row, r_.head_dim_qk, random);
    for (size_t r = 0; r < r_.kv_lens.size(); ++r) {
      for (int64_t key = first_keys_[r]; key < first_keys_[r] + r_.kv_lens[r]; ++key) {
        tail_->fill(key, r_.tail_dims, random);
        for (int64_t h = 0; h < heads; ++h) {
          k_->fill(key * heads + h, own_dims(), random);
          v_->fill(key * heads + h, r_.head_dim_vo, random);
        }
      }
    }
  }

  void schedule() {
    ScheduleShape shape;
    shape.num_kv_heads = r_.num_kv_heads;
    shape.mask = {true, r_.window_left};
    shape.tile_q = S::kTileQ;
    shape.tile_kv = S::kTileKv;
    shape.num_ctas = r_.num_ctas;
    shape.max_partial_slots = 3 * r_.num_ctas;
    shape.merges_readers_last = true;
    shape.item_steps = 8;
    shape.uncut_part = 16;
    shape.cost = {.tile = 10, .step = 2500, .split = 10, .error_part = 6};  // there are many cuts
    std::vector<int32_t> lens;
    for (int32_t r = 0; r < batch_; ++r) lens.push_back(planned(r));
    Batch batch;
    batch.qo_indptr = first_tokens_.data();
    batch.kv_lens = lens.data();
    batch.kv_indptr = first_keys_.data();
    batch.batch_size = batch_;
    scheduler_.emplace(shape, batch_, first_tokens_.back());
    scheduler_->make(batch);
    const Schedule& s = scheduler_->schedule();
    merges_.assign(static_cast<size_t>(s.first_merge), {});
    merges_.insert(merges_.end(), s.merges.begin(), s.merges.end());
    arrivals_.assign(merges_.size() + 1, {});
    partial_o_.assign(static_cast<size_t>(s.num_partial_rows) * kVo / 4 + 1, {NAN, NAN, NAN, NAN});
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
                        .group_size = make_divisor(1),
                        .segments = s.segments.data(),
                        .tiles = s.tiles.data(),
                        .merges = merges_.data(),
                        .arrivals = arrivals_.data(),
                        .num_ctas = r_.num_ctas};
    const int64_t heads = r_.num_kv_heads;
    TensorParams& t = params_.tensors;
    t.q = {q_->data(), heads * q_->stride, q_->stride};
    t.k = {k_->data(), 0, heads * k_->stride, k_->stride};
    t.v = {v_->data(), 0, heads * v_->stride, v_->stride};
    t.o = {o_->data(), heads * o_->stride, o_->stride};
    t.lse = {lse_.data(), heads, 1};
    if (!r_.planned_lens.empty()) t.kv_lens = r_.kv_lens.data();
    t.q_dtype = t.kv_dtype = t.o_dtype = kBf16;
    t.vectorized = is_aligned() && r_.head_dim_vo % 8 == 0;
    t.has_key_tail = true;
    t.head_dim_qk = r_.head_dim_qk;
    t.head_dim_vo = r_.head_dim_vo;
    params_.tails.k = {{tail_->data(), 0, tail_->stride, 0}, r_.tail_dims};
    params_.mask = {true, r_.window_left};
    params_.variant.logits_scale = scale();
    params_.variant.v_scale = 0.75F;
    params_.workspace = {nullptr, 0, &partial_o_.data()->x, partial_lse_.data()};
    params_.maps.num_kv_tokens = first_keys_.back();
    if (!r_.by_rows && t.vectorized && own_dims() % 64 == 0) make_maps();
  }

  /// Describes the tensors to the emulated TMA, as cuda/tensor_maps.cpp does to the real one.
  void make_maps() {
    using device::EmulatedMap;
    TensorMaps& maps = params_.maps;
    const int64_t keys = first_keys_.back();
    const auto part = [&](Rows& rows, int64_t dims, int64_t heads) {
      return EmulatedMap{rows.data(),
                         {{{dims, 1}, {keys, heads * rows.stride}, {}, {}, {heads, rows.stride}}},
                         {64, S::kTileKv, 1, 1, 1}};
    };
    const auto put = [](TensorMap& map, const EmulatedMap& from) {
      std::memcpy(&map, &from, sizeof(from));
    };
    put(maps.k, part(*k_, own_dims(), r_.num_kv_heads));
    put(maps.k_tail, part(*tail_, r_.tail_dims, 1));
    const bool has_all_blocks = r_.head_dim_qk == kQk && r_.head_dim_vo == kVo;
    const int32_t rows = has_all_blocks ? S::kTileKv : 8;
    const int32_t blocks = has_all_blocks ? kVo / 64 : 1;
    const int64_t stride = r_.num_kv_heads * v_->stride;
    put(maps.v, {v_->data(),
                 {{{has_all_blocks ? 64 : r_.head_dim_vo, 1},
                   {keys, stride},
                   {blocks, 64},
                   {rows / 8, 8 * stride},
                   {r_.num_kv_heads, v_->stride}}},
                 {64, 8, blocks, rows / 8, 1}});
    maps.has_kv = true;
    maps.has_all_blocks = has_all_blocks;
    maps.box_rows = rows;
    maps.v_slabs_per_page = r_.num_kv_heads;
  }

  float scale() const { return 1.0F / std::sqrt(static_cast<float>(r_.head_dim_qk)); }

  double error_of_row(int32_t r, int64_t token, int32_t head, int32_t last) {
    const int64_t row = token * r_.num_kv_heads + head;
    const int32_t first = r_.window_left < 0 ? 0 : std::max(last - r_.window_left, 0);
    const auto dims = static_cast<size_t>(r_.head_dim_vo);
    std::vector<double> wanted(dims, 0.0);
    std::vector<double> logits;
    for (int32_t key = first; key <= last; ++key) {
      const int64_t at = first_keys_[static_cast<size_t>(r)] + key;
      double x = 0;
      for (int32_t d = 0; d < r_.head_dim_qk; ++d) {
        const bool is_own = d < own_dims();
        const uint16_t of_key =
            is_own ? k_->at(at * r_.num_kv_heads + head, d) : tail_->at(at, d - own_dims());
        x += double{value_of(q_->at(row, d))} * value_of(of_key);
      }
      logits.push_back(x * scale());
    }
    const float lse = lse_[static_cast<size_t>(row)];
    if (logits.empty()) return lse == -HUGE_VALF && value_of(o_->at(row, 0)) == 0 ? 0 : HUGE_VAL;
    const double largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (int32_t key = first; key <= last; ++key) {
      const double weight = std::exp(logits[static_cast<size_t>(key - first)] - largest);
      const int64_t at = first_keys_[static_cast<size_t>(r)] + key;
      sum += weight;
      for (size_t d = 0; d < dims; ++d) {
        wanted[d] +=
            weight * value_of(v_->at(at * r_.num_kv_heads + head, static_cast<int64_t>(d)));
      }
    }
    double size = 0.1;
    for (const double x : wanted) size = std::max(size, std::fabs(x / sum));
    double worst = std::fabs(lse - (largest + std::log(sum)));
    for (size_t d = 0; d < dims; ++d) {
      const double got = value_of(o_->at(row, static_cast<int64_t>(d)));
      const double error = std::fabs(got - 0.75 * wanted[d] / sum) / size;
      worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error);
    }
    return worst;
  }

  const Requests r_;
  const int32_t batch_;
  std::vector<int32_t> first_tokens_ = {0};
  std::vector<int32_t> first_keys_ = {0};
  std::optional<Rows> q_, k_, tail_, v_, o_;
  std::vector<float> lse_, partial_lse_;
  std::vector<float4> partial_o_;
  std::optional<OwningScheduler> scheduler_;
  std::vector<Merge> merges_;
  std::vector<Arrivals> arrivals_;
  std::vector<QueueStart> starts_;
  AttentionParams params_;
};

/// Runs a batch twice, with warps in different orders.
template <int kQk = 192, int kVo = 128>
void check(const Requests& requests, const char* what) {
  TailBatch<kQk, kVo> batch(requests);
  const std::vector<uint16_t> first = batch.run(1);
  const double error = batch.error();
  if (!(error < 0.02)) {
    check::fail(__FILE__, __LINE__, std::string(what) + ": error " + std::to_string(error));
  }
  if (first != batch.run(2)) {
    check::fail(__FILE__, __LINE__, std::string(what) + ": other bits in another order");
  }
}

const std::vector<int32_t> kQoLens = {1, 200, 5, 0};
const std::vector<int32_t> kKvLens = {1, 300, 129, 40};

TEST(by_boxes) {
  check({.qo_lens = kQoLens, .kv_lens = kKvLens}, "whole blocks");
  check({.qo_lens = {30, 150}, .kv_lens = {300, 170}, .tail_dims = 128}, "a tail of two blocks");
  check({.qo_lens = kQoLens, .kv_lens = kKvLens, .head_dim_qk = 160, .tail_dims = 32},
        "part of a block");
  check({.qo_lens = kQoLens, .kv_lens = kKvLens, .head_dim_vo = 96, .window_left = 60}, "a window");
  check({.qo_lens = {30, 20}, .kv_lens = {300, 0}, .planned_lens = {900, 90}}, "shorter");
  check<256, 256>({.qo_lens = kQoLens, .kv_lens = kKvLens, .head_dim_qk = 256, .head_dim_vo = 256},
                  "256 dims");
}
TEST(by_rows) {
  check({.qo_lens = kQoLens, .kv_lens = kKvLens, .by_rows = true}, "no maps");
  check({.qo_lens = {30, 20},
         .kv_lens = {300, 70},
         .head_dim_qk = 150,
         .head_dim_vo = 100,
         .tail_dims = 33},
        "not aligned");
  check({.qo_lens = {30, 20}, .kv_lens = {300, 70}, .tail_dims = 40}, "a block of both");
}

}  // namespace
}  // namespace flashplan::test
