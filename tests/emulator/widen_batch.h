// SPDX-License-Identifier: Apache-2.0
// A batch for the Hopper kernels that widen 8-bit keys and values, run by the emulator: tensors, a
// schedule, and the error of results against double arithmetic. CTAs run at the same time, and
// their warps in a random order. Memory that must not be read is NaN.
#pragma once

#include "kernels/device/sm90/attention.h"

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
#include "owning_scheduler.h"

namespace flashplan::test {

using device::Element;
constexpr DType kQ = DType::kBFloat16;
constexpr DType kKv = DType::kFloat8E4M3;
constexpr uint8_t kNan = 0x7f;

struct Requests {
  std::vector<int32_t> qo_lens;
  std::vector<int32_t> kv_lens;
  int32_t num_kv_heads = 1;
  int32_t group_size = 1;
  int32_t page_size = 16;  // 0: ragged
  int32_t num_ctas = 2;
  int32_t head_dim = 64;
  int32_t window_left = -1;
  int32_t prepare_reads = 2;
  int32_t max_prepared = 1000;
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
  int32_t prefix = 0;                      // keys that all requests share
  bool has_missing_pages = false;
  bool cuts_much = false;
  bool has_nan = false;             // among the keys
  bool is_csr = false;              // page ids
  bool has_narrow_queries = false;  // of 8 bits
};

inline float value_of(uint16_t bits) { return Element<kQ>::unpack(bits).x; }
inline float value_of(uint8_t bits) { return Element<kKv>::to_float(bits); }

template <typename T>
T* aligned(std::vector<T>& memory) {
  const auto address = (reinterpret_cast<uintptr_t>(memory.data()) + 127) & ~uintptr_t{127};
  return reinterpret_cast<T*>(address);
}

/// A kernel of `kDims` dims, and tensors of a batch for it.
template <int32_t kDims>
class Batched {
  using Choices = device::Traits<kQ, kKv, kDims, kDims, device::Standard>;
  using S = device::Sm90Shape<Choices>;
  using Memory = device::Sm90SharedMemory<S>;

 public:
  explicit Batched(const Requests& requests)
      : r_(requests), batch_(static_cast<int32_t>(requests.kv_lens.size())) {
    first_tokens_.push_back(0);
    for (const int32_t n : r_.qo_lens) first_tokens_.push_back(first_tokens_.back() + n);
    make_tensors();
    schedule();
    make_params();
  }
  int32_t num_prepared() const { return prepared_tiles_[0]; }
  int32_t num_merges() const { return static_cast<int32_t>(merges_.size()); }

  void run(unsigned seed) {
    std::fill(o_.begin(), o_.end(), uint16_t{0xffff});
    std::fill(lse_.begin(), lse_.end(), NAN);
    std::fill(partial_o_.begin(), partial_o_.end(), NAN);
    std::fill(prepared_.begin(), prepared_.end(), uint8_t{0xff});
    static simt::Machine machine;
    simt::shuffles_warps = true;
    simt::first_random = seed;
    simt::describe_waits = device::describe_mbarriers;
    machine.run(static_cast<unsigned>(r_.num_ctas), r_.num_ctas, S::kThreads, [&] {
      if (threadIdx.x == 0) begin_cta(seed);
      device::sm90_attention_kernel<Choices>(params_);
      device::bulk_store_wait();
      if (simt::cta->num_done + 1 == simt::cta->size) end_cta();
    });
    for (const Arrivals& arrivals : arrivals_) {
      for (const int32_t counter : arrivals.counters) CHECK_EQ(counter, 0);
    }
    CHECK_EQ(num_left_, 0);
    for (const PreparedState& s : states_) {
      CHECK(s.claimed == 0 && s.keys == 0 && s.values == 0 && s.unused == 0);
    }
  }

  /// The largest error of o and lse, in units of the largest value of a row.
  double error() const {
    double worst = 0;
    for (int32_t r = 0; r < batch_; ++r) {
      const int32_t qo_len = r_.qo_lens[static_cast<size_t>(r)];
      for (int32_t i = 0; i < qo_len; ++i) {
        for (int32_t h = 0; h < num_heads(); ++h) worst = std::max(worst, error_of_row(r, i, h));
      }
    }
    return worst;
  }
  const std::vector<uint16_t>& results() const { return o_; }

 private:
  int32_t num_heads() const { return r_.num_kv_heads * r_.group_size; }
  int32_t planned(int32_t r) const {
    const auto i = static_cast<size_t>(r);
    return r_.planned_lens.empty() ? r_.kv_lens[i] : r_.planned_lens[i];
  }
  int32_t page() const { return std::max(r_.page_size, 1); }
  bool is_aligned() const { return r_.head_dim % 16 == 0; }
  /// Bytes from a row of 8-bit queries to the next one.
  int64_t narrow_pitch() const { return r_.head_dim + (is_aligned() ? 16 : 3); }

  void begin_cta(unsigned seed) const {
    std::memset(device::smem, 0xff, sizeof(device::smem));
    device::copy_engine().random.seed(seed + blockIdx.x);
    device::reset_named_barriers();
    device::mbarrier_facts().clear();
    const device::Sm90Smem<S> smem(*reinterpret_cast<Memory*>(device::smem));
    const auto name = device::name_mbarriers;
    for (uint32_t i = 0; i < S::kSlots; ++i) {
      name("slot_full", smem.slot_full(i), "slot_empty", smem.slot_empty(i), i);
    }
    for (uint32_t i = 0; i < S::kQBarriers; ++i) {
      name("q_full", smem.q_full(i), "q_empty", smem.q_empty(i), i);
    }
    for (uint32_t i = 0; i < S::kContexts; ++i) {
      name("context_full", smem.context_full(i), "context_empty", smem.context_empty(i), i);
    }
  }
  /// All slots must have been freed, and nothing may be under way.
  void end_cta() const {
    const device::Sm90Smem<S> smem(*reinterpret_cast<Memory*>(device::smem));
    if (!device::copy_engine().copies.empty()) simt::fail("copies are under way at the end");
    const auto must_be_over = [](uint32_t at) {
      const device::Mbarrier& word = *device::at_shared<device::Mbarrier>(at);
      if (word.pending != word.count || word.bytes != 0) {
        device::fail_at(at, "some have arrived, and others have not, at the end");
      }
    };
    for (uint32_t i = 0; i < S::kSlots; ++i) {
      must_be_over(smem.slot_full(i));
      must_be_over(smem.slot_empty(i));
      if (device::mbarrier_facts()[smem.slot_full(i)].num_phases !=
          device::mbarrier_facts()[smem.slot_empty(i)].num_phases) {
        device::fail_at(smem.slot_full(i), "a slot was not freed");
      }
    }
    for (uint32_t i = 0; i < S::kQBarriers; ++i) {
      must_be_over(smem.q_full(i));
      must_be_over(smem.q_empty(i));
    }
  }

  int64_t kv_row(int32_t r, int32_t key) const {
    if (r_.page_size == 0) return first_rows_[static_cast<size_t>(r)] + key;
    return int64_t{page_of(r, key)} * page() + key % page();
  }
  int32_t page_of(int32_t r, int32_t key) const {
    return pages_[static_cast<size_t>(r * most_pages_ + key / page())];
  }
  bool has_key(int32_t r, int32_t key) const {
    return r_.page_size == 0 || (page_of(r, key) >= 0 && page_of(r, key) < num_pages_);
  }

  void make_tensors() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    most_pages_ = 1;
    int32_t num_rows = 0;
    for (int32_t r = 0; r < batch_; ++r) {
      most_pages_ = std::max(most_pages_, (planned(r) + page() - 1) / page());
      first_rows_.push_back(num_rows);
      num_rows += planned(r) + 3;
    }
    if (r_.page_size > 0) {
      pages_.resize(static_cast<size_t>(most_pages_ * batch_));
      std::iota(pages_.begin(), pages_.end(), 0);
      std::shuffle(pages_.begin(), pages_.end(), random);
      num_pages_ = most_pages_ * batch_;
      num_rows = num_pages_ * page();
      for (int32_t r = 1; r < batch_; ++r) {
        for (int32_t key = 0; key < r_.prefix; key += page()) {
          pages_[static_cast<size_t>(r * most_pages_ + key / page())] = page_of(0, key);
        }
      }
      for (int32_t r = 0; r < batch_; ++r) {
        for (int32_t i = 0; i < most_pages_; ++i) {
          const bool is_missing = r_.has_missing_pages && random() % 5 == 0;
          if (is_missing || i * page() >= r_.kv_lens[static_cast<size_t>(r)]) {
            pages_[static_cast<size_t>(r * most_pages_ + i)] = random() % 2 == 0 ? 0x7fffffff : -1;
          }
        }
      }
    }
    num_kv_rows_ = num_rows;
    kv_stride_ = (r_.head_dim + (is_aligned() ? 16 : 3)) * int64_t{r_.num_kv_heads};
    q_stride_ = (r_.head_dim + 8) * int64_t{num_heads()};
    const auto kv_size = static_cast<size_t>(num_rows * kv_stride_) + 256;
    k_.assign(kv_size, kNan);
    v_.assign(kv_size, kNan);
    q_.assign(static_cast<size_t>(num_tokens() * q_stride_) + 256, 0xffff);
    narrow_q_.assign(static_cast<size_t>(num_tokens() * num_heads() * narrow_pitch()) + 256, kNan);
    for (int64_t row = 0; row < int64_t{num_tokens()} * num_heads(); ++row) {
      for (int32_t d = 0; d < r_.head_dim; ++d) {
        float x = 0;
        if (r_.has_narrow_queries) {
          const uint8_t narrow = random_element(random);
          aligned(narrow_q_)[row * narrow_pitch() + d] = narrow;
          x = value_of(narrow);
        } else {
          x = normal(random);
        }
        aligned(q_)[row * (r_.head_dim + 8) + d] =
            static_cast<uint16_t>(Element<kQ>::pack(x, 0.0F));
      }
    }
    for (int32_t h = 0; h < r_.num_kv_heads; ++h) q_scales_.push_back(0.7F + 0.3F * float(h % 3));
    for (int32_t r = 0; r < batch_; ++r) {
      for (int32_t key = 0; key < r_.kv_lens[static_cast<size_t>(r)]; ++key) {
        if (!has_key(r, key)) continue;
        for (int32_t h = 0; h < r_.num_kv_heads; ++h) {
          for (int32_t d = 0; d < r_.head_dim; ++d) {
            k_at(r, key, h, d) = random_element(random);
            v_at(r, key, h, d) = random_element(random);
          }
          if (r_.has_nan && random() % 100 == 0) k_at(r, key, h, 3) = kNan;
        }
      }
    }
    o_.resize(static_cast<size_t>(num_tokens() * num_heads() * r_.head_dim) + 128);
    lse_.resize(static_cast<size_t>(num_tokens() * num_heads()));
  }
  /// Up to 2.
  static uint8_t random_element(std::mt19937& random) {
    return static_cast<uint8_t>((random() & 0x80) | random() % 0x41);
  }
  int32_t num_tokens() const { return first_tokens_.back(); }
  uint8_t& k_at(int32_t r, int32_t key, int32_t h, int32_t d) { return element(k_, r, key, h, d); }
  uint8_t& v_at(int32_t r, int32_t key, int32_t h, int32_t d) { return element(v_, r, key, h, d); }
  uint8_t& element(std::vector<uint8_t>& from, int32_t r, int32_t key, int32_t h, int32_t d) const {
    return aligned(from)[kv_row(r, key) * kv_stride_ + h * (kv_stride_ / r_.num_kv_heads) + d];
  }

  void schedule() {
    ScheduleShape shape;
    shape.num_kv_heads = r_.num_kv_heads;
    shape.group_size = r_.group_size;
    shape.mask = {true, r_.window_left};
    shape.paged = r_.page_size > 0;
    shape.tile_q = S::kTileQ;
    shape.tile_kv = S::kTileKv;
    shape.num_ctas = r_.num_ctas;
    shape.max_partial_slots = 3 * r_.num_ctas;
    shape.shares_prefixes = r_.prefix > 0;
    shape.merges_readers_last = true;
    shape.item_steps = 8;
    shape.uncut_part = 16;
    shape.prepare_reads = r_.prepare_reads;
    shape.prepares_some = true;
    shape.cost = {.tile = 3200,
                  .step = 2500,
                  .split = 3000,
                  .split_row = 40,
                  .write = 1000,
                  .write_row = 13,
                  .merge = 200,
                  .merge_row = 160,
                  .cached = 700,
                  .error_part = 6};
    if (r_.cuts_much) shape.cost = {.tile = 10, .step = 2500, .split = 10, .error_part = 6};
    std::vector<int32_t> lens;
    for (int32_t r = 0; r < batch_; ++r) lens.push_back(planned(r));
    std::vector<int32_t> kv_indptr = first_rows_;
    kv_indptr.push_back(num_kv_rows_);
    const int32_t prefixes[] = {0, batch_, r_.prefix};
    Batch batch;
    batch.qo_indptr = first_tokens_.data();
    batch.kv_lens = lens.data();
    batch.batch_size = batch_;
    if (r_.page_size == 0) batch.kv_indptr = kv_indptr.data();
    if (r_.prefix > 0) {
      batch.shared_prefixes = prefixes;
      batch.num_shared_prefixes = 1;
    }
    scheduler_.emplace(shape, batch_, num_tokens());
    scheduler_->make(batch);
    const Schedule& s = scheduler_->schedule();
    merges_.assign(static_cast<size_t>(s.first_merge), {});
    merges_.insert(merges_.end(), s.merges.begin(), s.merges.end());
    arrivals_.assign(merges_.size() + 1, {});
    partial_o_.assign(static_cast<size_t>(s.num_partial_rows) * kDims + 64, NAN);
    partial_lse_.assign(static_cast<size_t>(s.num_partial_rows) + 64, NAN);
    prepared_tiles_.assign(s.segments.size() + 1, -7);
    const PreparedTiles to = {prepared_tiles_.data() + 1, prepared_tiles_.data()};
    choose_prepared_kv(batch, shape, s.segments, r_.window_left < 0 ? r_.max_prepared : 0, to);
    const auto num_prepared = static_cast<size_t>(prepared_tiles_[0]);
    const size_t heads = num_prepared * static_cast<size_t>(r_.num_kv_heads);
    states_.assign((num_prepared + 32) * static_cast<size_t>(r_.num_kv_heads), {});
    prepared_.assign(heads * (S::kKeyBytes + S::kValueBytes) + 256, 0xff);
    starts_.assign(static_cast<size_t>(r_.num_ctas), {});
    for (size_t c = 0; c < starts_.size(); ++c) {
      QueueStart& start = starts_[c];
      start.begin = s.cta_indptr[c];
      start.end = s.cta_indptr[c + 1];
      start.first_prepared[0] = start.first_prepared[1] = kNotPrepared;
      for (int32_t i = 0; i < std::min(start.end - start.begin, 2); ++i) {
        start.tiles[i] = s.tiles[static_cast<size_t>(start.begin + i)];
        const auto segment = static_cast<size_t>(start.tiles[i].segment);
        start.segments[i] = s.segments[segment];
        start.first_prepared[i] = prepared_tiles_[segment + 1];
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
                        .num_ctas = r_.num_ctas};
    TensorParams& t = params_.tensors;
    const int64_t head_stride = kv_stride_ / r_.num_kv_heads;
    t.k = {aligned(k_), page() * kv_stride_, kv_stride_, head_stride};
    t.v = {aligned(v_), page() * kv_stride_, kv_stride_, head_stride};
    if (r_.page_size > 0) {
      t.pages = {pages_.data(),        nullptr,    most_pages_,
                 make_divisor(page()), num_pages_, most_pages_};
      for (int32_t r = 0; r <= batch_; ++r) page_indptr_.push_back(r * most_pages_);
      if (r_.is_csr) {
        t.pages.indptr = page_indptr_.data();
        t.pages.num_ids = batch_ * most_pages_;
      }
    }
    if (!r_.planned_lens.empty()) t.kv_lens = r_.kv_lens.data();
    t.q = {aligned(q_), q_stride_, r_.head_dim + 8};
    t.o = {aligned(o_), int64_t{num_heads()} * r_.head_dim, r_.head_dim};
    t.lse = {lse_.data(), num_heads(), 1};
    t.q_dtype = t.o_dtype = kQ;
    if (r_.has_narrow_queries) {
      t.q = {aligned(narrow_q_), num_heads() * narrow_pitch(), narrow_pitch()};
      t.q_dtype = kKv;
      params_.q_scales = {q_scales_.data(), 1};
    }
    t.kv_dtype = kKv;
    t.vectorized = is_aligned();
    t.head_dim_qk = t.head_dim_vo = r_.head_dim;
    params_.mask = {true, r_.window_left};
    params_.variant.logits_scale = scale();
    params_.variant.v_scale = 0.75F;
    params_.workspace = {nullptr, 0, aligned(partial_o_), partial_lse_.data()};
    PreparedKv& kv = params_.prepared;
    const auto heads = static_cast<size_t>(prepared_tiles_[0] * r_.num_kv_heads);
    kv.keys = aligned(prepared_);
    kv.values = kv.keys + heads * S::kKeyBytes;
    kv.first_tiles = prepared_tiles_.data() + 1;
    kv.num_tiles = prepared_tiles_.data();
    // As src/api/run.cpp and most_prepared_tiles() do.
    const bool may_prepare = r_.max_prepared > 0 && r_.window_left < 0 && r_.planned_lens.empty();
    kv.states = may_prepare ? states_.data() : nullptr;
    kv.num_left = &num_left_;
    kv.num_kv_heads = r_.num_kv_heads;
  }

  /// NaN is next to NaN alone.
  static double distance(double x, double wanted) {
    if (std::isnan(x) || std::isnan(wanted)) return std::isnan(x) == std::isnan(wanted) ? 0 : 1e9;
    return std::fabs(x - wanted);
  }

  double query_scale(int32_t kv_head) const {
    return r_.has_narrow_queries ? q_scales_[static_cast<size_t>(kv_head)] : 1;
  }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(r_.head_dim)); }

  double error_of_row(int32_t r, int32_t i, int32_t head) const {
    auto& self = const_cast<Batched&>(*this);
    const int32_t kv_len = r_.kv_lens[static_cast<size_t>(r)];
    const int32_t last = kv_len - r_.qo_lens[static_cast<size_t>(r)] + i;
    const int32_t first = r_.window_left < 0 ? 0 : std::max(last - r_.window_left, 0);
    const int64_t row = int64_t{first_tokens_[static_cast<size_t>(r)] + i} * num_heads() + head;
    const int32_t kv_head = head / r_.group_size;
    const auto dims = static_cast<size_t>(r_.head_dim);
    std::vector<double> wanted(dims, 0.0);
    std::vector<std::pair<int32_t, double>> logits;
    double largest = -HUGE_VAL;
    for (int32_t key = first; key <= last; ++key) {
      if (!has_key(r, key)) continue;
      double x = 0;
      for (int32_t d = 0; d < r_.head_dim; ++d) {
        x += double{value_of(aligned(self.q_)[row * (r_.head_dim + 8) + d])} *
             value_of(self.k_at(r, key, kv_head, d));
      }
      logits.emplace_back(key, x * scale() * query_scale(kv_head));
      largest = std::max(largest, logits.back().second);
    }
    double sum = 0;
    for (const auto& [key, x] : logits) {
      const double weight = std::exp(x - largest);
      sum += weight;
      for (int32_t d = 0; d < r_.head_dim; ++d) {
        wanted[static_cast<size_t>(d)] += weight * value_of(self.v_at(r, key, kv_head, d));
      }
    }
    const float lse = lse_[static_cast<size_t>(row)];
    const auto o = [&](int32_t d) {
      return double{value_of(aligned(self.o_)[row * r_.head_dim + d])};
    };
    if (sum == 0) return lse == -HUGE_VALF && o(0) == 0 && o(r_.head_dim - 1) == 0 ? 0 : HUGE_VAL;
    double size = 0.1;
    for (const double x : wanted) size = std::max(size, std::isnan(x) ? 0 : std::fabs(x / sum));
    double worst = distance(lse, largest + std::log(sum));
    for (int32_t d = 0; d < r_.head_dim; ++d) {
      worst = std::max(worst, distance(o(d), 0.75 * wanted[static_cast<size_t>(d)] / sum) / size);
    }
    return worst;
  }

  const Requests r_;
  const int32_t batch_;
  std::vector<int32_t> first_tokens_;
  std::vector<int32_t> first_rows_;  // of ragged keys
  std::vector<int32_t> pages_;
  std::vector<int32_t> page_indptr_;
  int32_t most_pages_ = 0;  // of a request
  int32_t num_pages_ = 1;   // of the cache
  int32_t num_kv_rows_ = 0;
  int64_t kv_stride_ = 0;
  int64_t q_stride_ = 0;
  std::vector<uint8_t> k_, v_, prepared_, narrow_q_;
  std::vector<uint16_t> q_, o_;  // q_: what all queries are
  std::vector<float> q_scales_;  // of 8-bit queries
  std::vector<float> lse_, partial_o_, partial_lse_;
  std::optional<OwningScheduler> scheduler_;
  std::vector<Merge> merges_;
  std::vector<Arrivals> arrivals_;
  std::vector<QueueStart> starts_;
  std::vector<int32_t> prepared_tiles_;  // their number, then the first one of each segment
  std::vector<PreparedState> states_;
  int32_t num_left_ = 0;
  AttentionParams params_;
};

}  // namespace flashplan::test
