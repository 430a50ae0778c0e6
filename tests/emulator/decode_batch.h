// SPDX-License-Identifier: Apache-2.0
// Batches of decodes for the sm80 kernels, run by the emulator, and their errors against double
// arithmetic.
#pragma once

#include "kernels/device/sm80/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "check.h"
#include "owning_scheduler.h"

namespace flashplan::test {

using device::Element;

constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;

/// What is asked of a batch of decodes.
struct Decodes {
  std::vector<int32_t> kv_lens;
  int32_t num_kv_heads = 1;
  int32_t group_size = 1;
  int32_t qo_len = 1;
  int32_t page_size = 16;  // 0: ragged
  int32_t num_ctas = 1;
  int32_t window_left = -1;
  std::vector<int32_t> planned_lens = {};  // if longer than kv_lens
  bool misses_pages = false;  // some keys that queries see have page ids outside of the cache
  float sharpness = 1.0F;     // standard deviation of the logits
  int32_t tail_dims = 0;      // the last dims of ragged keys, in a tensor of their own
  int32_t chunk_kv = 0;       // see ScheduleShape
};

template <DType kDType>
float value_of(uint32_t bits) {
  if constexpr (Element<kDType>::kBytes == 2) {
    return Element<kDType>::unpack(bits).x;
  } else {
    return Element<kF16>::unpack(Element<kDType>::widen(bits).x).x;
  }
}

/// Random elements, then `num_poisoned` rows of NaN. Every row of `dims` elements is followed by
/// `gap` others.
template <DType kDType>
struct Tensor {
  Tensor(std::mt19937& random, int64_t num_rows, int64_t num_poisoned, int32_t dims, int32_t gap,
         float gain = 1.0F)
      : row(dims + gap),
        bytes(static_cast<size_t>((num_rows + num_poisoned) * row * kBytes + 16), 0xff) {
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<uint32_t> byte(0, 255);
    for (int64_t r = 0; r < num_rows; ++r) {
      for (int32_t d = 0; d < dims; ++d) {
        uint32_t bits = 0;
        if constexpr (kBytes == 2) {
          bits = Element<kDType>::pack(normal(random) * gain, 0.0F) & 0xffffU;
        } else {
          do bits = byte(random);
          while (!(std::fabs(value_of<kDType>(bits)) < 4));
        }
        std::memcpy(&bytes[static_cast<size_t>((r * row + d) * kBytes)], &bits, kBytes);
      }
    }
  }
  float at(int64_t r, int32_t d) const {
    uint32_t bits = 0;
    std::memcpy(&bits, &bytes[static_cast<size_t>((r * row + d) * kBytes)], kBytes);
    return value_of<kDType>(bits);
  }

  static constexpr int kBytes = Element<kDType>::kBytes;
  int64_t row;  // elements from row to row
  std::vector<unsigned char> bytes;
};

struct Results {
  std::vector<float> o;
  std::vector<float> lse;
};

/// A kernel, and tensors of a batch for it.
template <typename Choices, int32_t kDims>
class Batch16 {
  using T = device::Tiling<Choices, 228>;

 public:
  Batch16(const Decodes& decodes, uint32_t seed, bool aligned, float gain = 1.0F)
      : d_(decodes), random_(seed), gap_(aligned ? 16 : 1), aligned_(aligned), gain_(gain) {}

  /// Runs the CTAs in this order.
  Results run(const std::vector<int32_t>& order) {
    make_tensors();
    schedule();
    static simt::Machine machine;
    for (const int32_t c : order) {
      params_.schedule.starts = starts_.data() + c;  // it runs as CTA 0
      machine.run(1, 1, T::kThreads, [&] { device::attention_kernel<Choices, true>(params_); });
    }
    for (const Arrivals& arrivals : arrivals_) {
      for (const int32_t counter : arrivals.counters) CHECK_EQ(counter, 0);
    }
    return {o_, lse_};
  }
  Results run() {
    std::vector<int32_t> order(static_cast<size_t>(d_.num_ctas));
    std::iota(order.begin(), order.end(), 0);
    return run(order);
  }
  bool cuts_pairs() const { return cuts_pairs_; }
  int32_t num_merges() const { return num_merges_; }

  /// The largest error of o, in units of the largest value of a row, and of lse.
  double error_of(const Results& results) const {
    double worst = 0;
    const int32_t num_heads = d_.num_kv_heads * d_.group_size;
    for (size_t r = 0; r < d_.kv_lens.size(); ++r) {
      for (int32_t i = 0; i < d_.qo_len; ++i) {
        for (int32_t h = 0; h < num_heads; ++h) {
          const int64_t row = (static_cast<int64_t>(r) * d_.qo_len + i) * num_heads + h;
          worst = std::max(worst, error_of_row(results, static_cast<int32_t>(r), i, h, row));
        }
      }
    }
    return worst;
  }

 private:
  int32_t planned(size_t r) const {
    return d_.planned_lens.empty() ? d_.kv_lens[r] : d_.planned_lens[r];
  }

  void make_tensors() {
    random_.seed(7);
    const auto batch = static_cast<int32_t>(d_.kv_lens.size());
    pages_.clear();
    int32_t rows = 0;
    most_pages_ = 1;
    for (int32_t r = 0; r < batch; ++r) {
      const int32_t page = std::max(d_.page_size, 1);
      most_pages_ = std::max(most_pages_, (planned(static_cast<size_t>(r)) + page - 1) / page);
    }
    if (d_.page_size > 0) {
      std::vector<int32_t> ids(static_cast<size_t>(most_pages_ * batch));
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), random_);
      pages_ = ids;
      rows = most_pages_ * batch * d_.page_size;
      for (int32_t r = 0; r < batch; ++r) replace_ids(r, most_pages_ * batch);
    } else {
      for (size_t r = 0; r < d_.kv_lens.size(); ++r) rows += planned(r);
    }
    const int64_t heads = d_.num_kv_heads;
    k_.emplace(random_, rows * heads, d_.page_size * heads, kDims - d_.tail_dims, gap_);
    k_tail_.emplace(random_, rows, 0, d_.tail_dims, gap_);
    v_.emplace(random_, rows * heads, d_.page_size * heads, kDims, gap_);
    q_.emplace(random_, int64_t{batch} * d_.qo_len * heads * d_.group_size, 0, kDims, gap_ / 2 * 2,
               gain_);
    o_.assign(static_cast<size_t>(int64_t{batch} * d_.qo_len * heads * d_.group_size * kDims), NAN);
    lse_.assign(o_.size() / kDims, NAN);
  }

  /// Replaces the ids of pages whose keys no query sees. Pages behind the request's length get ids
  /// outside of the cache. Pages before its window get such ids, and every second one the id of
  /// `poisoned_page`, which is the last of the cache. With misses_pages every third page that a
  /// query sees gets an id outside of the cache, too.
  void replace_ids(int32_t r, int32_t poisoned_page) {
    const int32_t kv_len = d_.kv_lens[static_cast<size_t>(r)];
    const KeySpan seen = Mask{true, d_.window_left}.visible(kv_len - d_.qo_len, {0, kv_len});
    const int32_t outside[] = {-1, 0x7fffffff, -0x7fffffff - 1, poisoned_page + 1};
    num_pages_ = poisoned_page + 1;
    for (int32_t i = 0; i < most_pages_; ++i) {
      int32_t& id = pages_[static_cast<size_t>(r * most_pages_ + i)];
      const bool is_behind = i * d_.page_size >= kv_len;
      const bool is_before = (i + 1) * d_.page_size <= seen.begin;
      if (is_before && i % 2 == 0) {
        id = poisoned_page;
      } else if (is_behind || is_before || (d_.misses_pages && (i + r) % 3 == 0)) {
        id = outside[i / 3 % 4];
      }
    }
  }
  bool has_page(int32_t r, int32_t key) const {
    if (d_.page_size == 0) return true;
    const int32_t id = pages_[static_cast<size_t>(r * most_pages_ + key / d_.page_size)];
    return id >= 0 && id < num_pages_;
  }

  void schedule() {
    const auto batch = static_cast<int32_t>(d_.kv_lens.size());
    ScheduleShape shape;
    shape.num_kv_heads = d_.num_kv_heads;
    shape.group_size = d_.group_size;
    shape.mask = {true, d_.window_left};
    shape.paged = d_.page_size > 0;
    shape.tile_q = T::kTileQ;
    shape.tile_kv = T::kTileKv;
    shape.heads_at_once = 2;
    shape.num_ctas = d_.num_ctas;
    shape.max_partial_slots = d_.chunk_kv > 0 ? 100 : 3 * d_.num_ctas;
    shape.chunk_kv = d_.chunk_kv;
    shape.cost = {.tile = 10, .step = 200, .split = 10};  // cuts cost little: there are many
    std::vector<int32_t> qo_indptr(static_cast<size_t>(batch) + 1);
    for (int32_t r = 0; r <= batch; ++r) qo_indptr[static_cast<size_t>(r)] = r * d_.qo_len;
    const std::vector<int32_t>& lens = d_.planned_lens.empty() ? d_.kv_lens : d_.planned_lens;
    scheduler_.emplace(shape, batch, batch * d_.qo_len);
    scheduler_->make({qo_indptr.data(), lens.data(), nullptr, batch});
    const Schedule& s = scheduler_->schedule();
    merges_.assign(static_cast<size_t>(s.first_merge), {});
    merges_.insert(merges_.end(), s.merges.begin(), s.merges.end());
    num_merges_ = static_cast<int32_t>(s.merges.size());
    arrivals_.assign(merges_.size(), {});
    starts_.assign(static_cast<size_t>(d_.num_ctas), {});
    for (size_t c = 0; c < starts_.size(); ++c) {
      QueueStart& start = starts_[c];
      start.begin = s.cta_indptr[c];
      start.end = s.cta_indptr[c + 1];
      for (int32_t i = 0; i < std::min(start.end - start.begin, 2); ++i) {
        start.tiles[i] = s.tiles[static_cast<size_t>(start.begin + i)];
        start.segments[i] = s.segments[static_cast<size_t>(start.tiles[i].segment)];
      }
    }
    for (const WorkTile& tile : s.tiles) {
      cuts_pairs_ = cuts_pairs_ || (tile.merge >= 0 && tile.num_kv_heads == 2);
    }
    partial_o_.assign(static_cast<size_t>(s.num_partial_rows) * T::kHeadDimVo + 4, NAN);
    partial_lse_.assign(static_cast<size_t>(s.num_partial_rows) + 1, NAN);

    params_ = {};
    params_.schedule = {.tile_q = T::kTileQ,
                        .group_size = make_divisor(d_.group_size),
                        .chunk_kv = d_.chunk_kv,
                        .segments = s.segments.data(),
                        .tiles = s.tiles.data(),
                        .merges = merges_.data(),
                        .arrivals = arrivals_.data(),
                        .num_ctas = d_.num_ctas};
    TensorParams& t = params_.tensors;
    const int64_t heads = d_.num_kv_heads;
    const auto view = [&](const auto& tensor) {
      return KvView{tensor.bytes.data(), d_.page_size * heads * tensor.row, heads * tensor.row,
                    tensor.row};
    };
    t.k = view(*k_);
    t.v = view(*v_);
    if (d_.page_size > 0) {
      t.pages = {pages_.data(), nullptr,    most_pages_, make_divisor(d_.page_size),
                 num_pages_,    most_pages_};
    }
    if (!d_.planned_lens.empty()) t.kv_lens = d_.kv_lens.data();
    const int64_t num_heads = heads * d_.group_size;
    t.q = {q_->bytes.data(), num_heads * q_->row, q_->row};
    t.o = {o_.data(), num_heads * kDims, kDims};
    t.lse = {lse_.data(), num_heads, 1};
    t.q_dtype = T::kQuery;
    t.kv_dtype = T::kKv;
    t.o_dtype = DType::kFloat32;
    t.vectorized = aligned_;
    t.head_dim_qk = t.head_dim_vo = kDims;
    t.has_key_tail = d_.tail_dims > 0;
    params_.tails.k = {{k_tail_->bytes.data(), 0, k_tail_->row, 0}, d_.tail_dims};
    params_.mask = shape.mask;
    params_.variant.logits_scale = scale();
    params_.variant.v_scale = 0.75F;
    q_scales_.clear();
    for (int32_t h = 0; h < d_.num_kv_heads; ++h) q_scales_.push_back(q_scale(h));
    if (T::kWidensQueries) params_.q_scales = {q_scales_.data(), 1};
    // A CTA keeps the state of a row that it merges, and each of its threads its own statistics.
    constexpr size_t kScratchFloats = T::kTileQ * T::kHeadDimVo / 4 * 6;
    scratch_.assign(d_.chunk_kv > 0 ? kScratchFloats : 0, NAN);
    params_.workspace = {scratch_.data(), static_cast<int64_t>(scratch_.size() * sizeof(float)),
                         partial_o_.data(), partial_lse_.data()};
  }

  /// The scale of the queries of a kv head: those of 8 bits have one.
  static float q_scale(int32_t kv_head) {
    return T::kWidensQueries ? 0.7F + 0.3F * static_cast<float>(kv_head % 3) : 1.0F;
  }
  float scale() const { return d_.sharpness / std::sqrt(static_cast<float>(kDims)) / gain_; }

  int64_t kv_row(int32_t r, int32_t key) const {
    if (d_.page_size > 0) {
      const int32_t page = pages_[static_cast<size_t>(r * most_pages_ + key / d_.page_size)];
      return int64_t{page} * d_.page_size + key % d_.page_size;
    }
    int64_t row = key;
    for (int32_t before = 0; before < r; ++before) row += planned(static_cast<size_t>(before));
    return row;
  }

  /// A dim of row `row` of k.
  float key_at(int64_t row, int32_t dim) const {
    const int32_t own_dims = kDims - d_.tail_dims;
    return dim < own_dims ? k_->at(row, dim) : k_tail_->at(row / d_.num_kv_heads, dim - own_dims);
  }

  double error_of_row(const Results& results, int32_t r, int32_t i, int32_t head,
                      int64_t row) const {
    const int32_t kv_len = d_.kv_lens[static_cast<size_t>(r)];
    const int32_t position = kv_len - d_.qo_len + i;
    const KeySpan keys = Mask{true, d_.window_left}.visible(position, {0, kv_len});
    std::vector<double> logits;
    const auto kv = [&](int32_t key) {
      return kv_row(r, key) * d_.num_kv_heads + head / d_.group_size;
    };
    double largest = -HUGE_VAL;
    std::vector<int64_t> rows;  // of the keys
    for (int32_t key = keys.begin; key < keys.end; ++key) {
      if (!has_page(r, key)) continue;
      rows.push_back(kv(key));
      double x = 0;
      for (int32_t d = 0; d < kDims; ++d) x += double{q_->at(row, d)} * key_at(rows.back(), d);
      logits.push_back(x * scale() * q_scale(head / d_.group_size));
      largest = std::max(largest, logits.back());
    }
    double sum = 0;
    std::vector<double> o(kDims, 0.0);
    for (size_t i = 0; i < rows.size(); ++i) {
      const double weight = std::exp(logits[i] - largest);
      sum += weight;
      for (int32_t d = 0; d < kDims; ++d) o[static_cast<size_t>(d)] += weight * v_->at(rows[i], d);
    }
    const float lse = results.lse[static_cast<size_t>(row)];
    if (logits.empty())
      return lse == -HUGE_VALF && results.o[static_cast<size_t>(row * kDims)] == 0 ? 0 : HUGE_VAL;
    double worst = std::fabs(lse - (largest + std::log(sum)));
    double size = 0.1;
    for (const double x : o) size = std::max(size, std::fabs(x / sum));
    for (int32_t d = 0; d < kDims; ++d) {
      const double wanted = 0.75 * o[static_cast<size_t>(d)] / sum;
      const double got = results.o[static_cast<size_t>(row * kDims + d)];
      worst = std::max(worst, std::isnan(got) ? HUGE_VAL : std::fabs(got - wanted) / size);
    }
    return worst;
  }

  const Decodes d_;
  std::mt19937 random_;
  const int32_t gap_;
  const bool aligned_;
  const float gain_;
  std::optional<Tensor<T::kQuery>> q_;
  std::optional<Tensor<T::kKv>> k_;
  std::optional<Tensor<T::kKv>> k_tail_;
  std::optional<Tensor<T::kKv>> v_;
  std::vector<int32_t> pages_;
  int32_t most_pages_ = 0;  // of a request
  int32_t num_pages_ = 1;   // of the cache
  std::vector<float> q_scales_;
  std::vector<float> o_, lse_, scratch_, partial_o_, partial_lse_;
  std::optional<OwningScheduler> scheduler_;
  std::vector<Merge> merges_;
  std::vector<Arrivals> arrivals_;
  std::vector<QueueStart> starts_;
  bool cuts_pairs_ = false;
  int32_t num_merges_ = 0;
  AttentionParams params_;
};

}  // namespace flashplan::test
