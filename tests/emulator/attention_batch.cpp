// SPDX-License-Identifier: Apache-2.0
#include "attention_batch.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "cuda/tensor_maps.h"

namespace flashplan::test {
namespace {

size_t index(int64_t i) { return static_cast<size_t>(i); }

double dot(const float* a, const float* b, int32_t count) {
  double sum = 0;
  for (int32_t d = 0; d < count; ++d) sum += double{a[d]} * b[d];
  return sum;
}

/// NaN is next to NaN alone.
double distance(double x, double wanted) {
  if (std::isnan(x) || std::isnan(wanted)) {
    return std::isnan(x) == std::isnan(wanted) ? 0 : HUGE_VAL;
  }
  return x == wanted ? 0 : std::fabs(x - wanted);
}

}  // namespace

KeyPlaces::KeyPlaces(const BatchNumbers& numbers, std::mt19937& random)
    : page_size_(numbers.page_size) {
  const auto& lens = numbers.planned_lens.empty() ? numbers.kv_lens : numbers.planned_lens;
  const auto batch_size = static_cast<int32_t>(lens.size());
  if (page_size_ == 0) {
    constexpr int32_t kGap = 3;
    for (const int32_t len : lens) {
      first_rows_.push_back(static_cast<int32_t>(num_rows_));
      num_rows_ += len + kGap;
    }
    first_rows_.push_back(static_cast<int32_t>(num_rows_));
    return;
  }
  for (const int32_t len : lens) most_pages_ = std::max(most_pages_, (len - 1) / page_size_ + 1);
  ids_.resize(index(most_pages_ * batch_size));
  std::iota(ids_.begin(), ids_.end(), 0);
  std::shuffle(ids_.begin(), ids_.end(), random);
  for (int32_t r = 1; r < batch_size; ++r) {
    for (int32_t page = 0; page * page_size_ < numbers.prefix; ++page) id(r, page) = id(0, page);
  }
  for (int32_t r = 0; r <= batch_size; ++r) indptr_.push_back(r * most_pages_);
  num_pages_ = numbers.num_pages > 0 ? numbers.num_pages : most_pages_ * batch_size + 1;
  num_rows_ = int64_t{num_pages_} * page_size_;
}

int64_t KeyPlaces::row(int32_t request, int32_t key) const {
  if (page_size_ == 0) return first_rows_[index(request)] + key;
  const int32_t id = ids_[index(request * most_pages_ + key / page_size_)];
  return int64_t{id} * page_size_ + key % page_size_;
}

bool KeyPlaces::has_key(int32_t request, int32_t key) const {
  if (page_size_ == 0) return true;
  const int32_t id = ids_[index(request * most_pages_ + key / page_size_)];
  return id >= 0 && id < num_pages_;
}

PageTable KeyPlaces::table(bool is_csr) const {
  if (page_size_ == 0) return {};
  PageTable table = {ids_.data(), nullptr,    most_pages_, make_divisor(page_size_),
                     num_pages_,  most_pages_};
  if (is_csr) {
    table.indptr = indptr_.data();
    table.num_ids = indptr_.back();
  }
  return table;
}

AttentionBatch::AttentionBatch(BatchNumbers numbers)
    : n_(std::move(numbers)), places_(n_, random_) {
  for (const int32_t n : n_.qo_lens) first_tokens_.push_back(first_tokens_.back() + n);
  const int64_t tokens = num_tokens();
  const int64_t q_rows = tokens * num_heads();
  const int64_t kv_rows = places_.num_rows() * n_.num_kv_heads;
  q_ = Rows(n_.q_dtype, q_rows, n_.head_dim_qk - n_.q_tail_dims, n_.aligned);
  q_tail_ = Rows(n_.q_dtype, q_rows, n_.q_tail_dims, n_.aligned);
  k_ = Rows(n_.kv_dtype, kv_rows, n_.head_dim_qk - n_.k_tail_dims, n_.aligned);
  k_tail_ = Rows(n_.kv_dtype, places_.num_rows(), n_.k_tail_dims, n_.aligned);
  if (!n_.shared_kv) v_ = Rows(n_.kv_dtype, kv_rows, n_.head_dim_vo, n_.aligned);
  o_ = Rows(n_.o_dtype, q_rows, n_.head_dim_vo, n_.aligned);
  lse_.assign(index(q_rows), NAN);
  if (n_.has_mask) {
    const int32_t most_keys = *std::max_element(n_.kv_lens.begin(), n_.kv_lens.end());
    mask_words_ = most_keys / 32 + 1;
    for (int64_t i = 0; i < tokens * mask_words_; ++i) {
      mask_.push_back(static_cast<uint32_t>(random_() | random_()));
    }
  }
  mask_begins_.assign(index(batch_size()), 0);
  sinks_.assign(index(num_heads()), kSink);
  prefixes_ = {0, batch_size(), n_.prefix};
  batch_.qo_indptr = first_tokens_.data();
  batch_.kv_lens = (n_.planned_lens.empty() ? n_.kv_lens : n_.planned_lens).data();
  batch_.kv_indptr = places_.kv_indptr();
  batch_.batch_size = batch_size();
  if (n_.prefix > 0) {
    batch_.shared_prefixes = prefixes_.data();
    batch_.num_shared_prefixes = 1;
  }
}

void AttentionBatch::fill(float q_gain, const std::function<float(int32_t key)>& gain) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(index(std::max(n_.head_dim_qk, n_.head_dim_vo)));
  const auto write = [&](Rows& rows, int64_t row, float by) {
    for (int32_t d = 0; d < rows.dims(); ++d) numbers[index(d)] = normal(random_) * by;
    rows.write(row, numbers.data());
  };
  for (int64_t row = 0; row < int64_t{num_tokens()} * num_heads(); ++row) {
    write(q_, row, q_gain);
    write(q_tail_, row, q_gain);
  }
  for (int32_t r = 0; r < batch_size(); ++r) {
    for (int32_t key = 0; key < kv_len(r); ++key) {
      const int64_t row = places_.row(r, key);
      const float by = gain(key);
      write(k_tail_, row, by);
      for (int32_t h = 0; h < n_.num_kv_heads; ++h) {
        write(k_, row * n_.num_kv_heads + h, by);
        if (!n_.shared_kv) write(v_, row * n_.num_kv_heads + h, 1.0F);
      }
    }
  }
}

void AttentionBatch::drop_pages_behind_keys() {
  if (n_.page_size == 0) return;
  const int32_t none[] = {-1, std::numeric_limits<int32_t>::max(),
                          std::numeric_limits<int32_t>::min(), places_.num_pages()};
  for (int32_t r = 0; r < batch_size(); ++r) {
    for (int32_t i = 0; i < places_.most_pages(); ++i) {
      if (i * n_.page_size >= kv_len(r)) places_.id(r, i) = none[(r + i) % 4];
    }
  }
}

ScheduleShape AttentionBatch::shape(int32_t tile_q, int32_t tile_kv) const {
  ScheduleShape shape;
  shape.num_kv_heads = n_.num_kv_heads;
  shape.group_size = n_.group_size;
  shape.mask = n_.mask;
  shape.paged = n_.page_size > 0;
  shape.tile_q = tile_q;
  shape.tile_kv = tile_kv;
  shape.num_ctas = n_.num_ctas;
  shape.max_partial_slots = n_.chunk_kv > 0 ? 100 : 3 * n_.num_ctas;
  shape.chunk_kv = n_.chunk_kv;
  shape.cost = {.tile = 10, .step = 200, .split = 10};  // cuts cost little: there are many
  return shape;
}

void AttentionBatch::make_schedule(const ScheduleShape& shape, int32_t row_floats) {
  scheduler_.emplace(shape, batch_size(), num_tokens());
  scheduler_->make(batch_);
  const Schedule& s = schedule();
  merges_.assign(index(s.first_merge), {});
  merges_.insert(merges_.end(), s.merges.begin(), s.merges.end());
  arrivals_.assign(merges_.size() + 1, {});
  partial_o_.assign(index(s.num_partial_rows) * index(row_floats) + 4, NAN);
  partial_lse_.assign(index(s.num_partial_rows) + 1, NAN);
  starts_.assign(index(n_.num_ctas), {});
  for (size_t c = 0; c < starts_.size(); ++c) {
    QueueStart& start = starts_[c];
    start.begin = s.cta_indptr[c];
    start.end = s.cta_indptr[c + 1];
    for (int32_t i = 0; i < std::min(start.end - start.begin, 2); ++i) {
      start.tiles[i] = s.tiles[index(start.begin + i)];
      start.segments[i] = s.segments[index(start.tiles[i].segment)];
    }
  }
  params_.schedule = {.starts = starts_.data(),
                      .tile_q = shape.tile_q,
                      .group_size = make_divisor(n_.group_size),
                      .chunk_kv = n_.chunk_kv,
                      .segments = s.segments.data(),
                      .tiles = s.tiles.data(),
                      .merges = merges_.data(),
                      .arrivals = arrivals_.data(),
                      .mask_begins = n_.has_mask ? mask_begins_.data() : nullptr,
                      .num_ctas = n_.num_ctas};
  params_.workspace.partial_o = partial_o_.data();
  params_.workspace.partial_lse = partial_lse_.data();
}

void AttentionBatch::make_params() {
  const auto of_tokens = [&](const Rows& rows) {
    return TokenView<void>{rows.data(), num_heads() * rows.stride(), rows.stride()};
  };
  const auto of_queries = [&](const Rows& rows) {
    return TokenView<const void>{rows.data(), num_heads() * rows.stride(), rows.stride()};
  };
  const auto of_keys = [&](const Rows& rows, int32_t num_heads) {
    const int64_t token = num_heads * rows.stride();
    return KvView{rows.data(), n_.page_size * token, token, num_heads > 1 ? rows.stride() : 0};
  };
  TensorParams& t = params_.tensors;
  t.pages = places_.table(n_.is_csr);
  if (!n_.planned_lens.empty()) t.kv_lens = n_.kv_lens.data();
  t.q = of_queries(q_);
  t.k = of_keys(k_, n_.num_kv_heads);
  t.v = n_.shared_kv ? t.k : of_keys(v_, n_.num_kv_heads);
  t.o = of_tokens(o_);
  t.lse = {lse_.data(), num_heads(), 1};
  t.q_dtype = n_.q_dtype;
  t.kv_dtype = n_.kv_dtype;
  t.o_dtype = n_.o_dtype;
  const int64_t dims = q_.dims() | k_.dims() | k_tail_.dims() | n_.head_dim_vo;
  t.vectorized = n_.aligned && dims * item_size(n_.kv_dtype) % 16 == 0;
  t.head_dim_qk = n_.head_dim_qk;
  t.head_dim_vo = n_.head_dim_vo;
  if (n_.has_mask) t.mask = {true, static_cast<int32_t>(mask_words_), mask_.data(), mask_words_};
  t.has_key_tail = n_.k_tail_dims > 0 && !n_.shared_kv;
  if (n_.q_tail_dims > 0) {
    params_.tails.q = of_queries(q_tail_);
    params_.tails.q_dims = n_.q_tail_dims;
  }
  if (n_.k_tail_dims > 0) params_.tails.k = {of_keys(k_tail_, 1), n_.k_tail_dims};
  params_.mask = n_.mask;
  params_.variant.logits_scale = n_.logits_scale;
  params_.variant.softcap = n_.softcap;
  params_.variant.v_scale = kVScale;
  if (n_.has_sinks) params_.variant.sinks = {sinks_.data(), false};
  if (!n_.k_scales.empty()) params_.variant.k_scales = {n_.k_scales.data(), 1};
  if (!n_.q_scales.empty()) params_.q_scales = {n_.q_scales.data(), 1};
}

void AttentionBatch::make_maps(const ScheduleShape& shape, int32_t most_qk, int32_t most_vo,
                               bool by_rows) {
  Kernel kernel;
  kernel.q_dtype = n_.q_dtype;
  kernel.kv_dtype = n_.kv_dtype;
  kernel.head_dim_qk = most_qk;
  kernel.head_dim_vo = most_vo;
  kernel.geometry.tile_q = shape.tile_q;
  kernel.geometry.tile_kv = shape.tile_kv;
  AttentionOptions options;
  options.num_qo_heads = num_heads();
  options.num_kv_heads = n_.num_kv_heads;
  options.head_dim_qk = n_.head_dim_qk;
  options.head_dim_vo = n_.head_dim_vo;
  options.page_size = n_.page_size;
  options.q_dtype = n_.q_dtype;
  options.kv_dtype = n_.kv_dtype;
  options.o_dtype = n_.o_dtype;
  options.shared_kv = n_.shared_kv;
  const auto of_keys = [&](const Rows& rows, int64_t heads) {
    if (n_.page_size == 0) return rows.view({places_.num_rows(), heads});
    return rows.view({places_.num_pages(), n_.page_size, heads});
  };
  AttentionTensors t;
  t.q = q_.view({num_tokens(), num_heads()});
  t.k = of_keys(k_, n_.num_kv_heads);
  if (!n_.shared_kv) t.v = of_keys(v_, n_.num_kv_heads);
  if (n_.q_tail_dims > 0) t.q_tail = q_tail_.view({num_tokens(), num_heads()});
  if (n_.k_tail_dims > 0) {
    t.k_tail = n_.shared_kv ? of_keys(k_tail_, 1) : k_tail_.view({places_.num_rows()});
  }
  t.o = o_.view({num_tokens(), num_heads()});
  params_.maps = cuda::encode_tensor_maps(kernel, options, t);
  params_.maps.has_o = false;  // stores by maps are not emulated
  if (by_rows) params_.maps.has_q = params_.maps.has_q_tokens = params_.maps.has_kv = false;
}

void AttentionBatch::begin_run() {
  o_.poison();
  std::fill(lse_.begin(), lse_.end(), NAN);
  std::fill(partial_o_.begin(), partial_o_.end(), NAN);
  std::fill(partial_lse_.begin(), partial_lse_.end(), NAN);
}

bool AttentionBatch::leaves_no_trace() const {
  return o_.has_untouched_gaps() &&
         std::all_of(arrivals_.begin(), arrivals_.end(), [](const Arrivals& arrivals) {
           return std::all_of(std::begin(arrivals.counters), std::end(arrivals.counters),
                              [](int32_t counter) { return counter == 0; });
         });
}

std::vector<float> AttentionBatch::results() const {
  std::vector<float> results;
  for (size_t row = 0; row < lse_.size(); ++row) {
    for (int32_t d = 0; d < n_.head_dim_vo; ++d) {
      results.push_back(o_.load(static_cast<int64_t>(row), d));
    }
    results.push_back(lse_[row]);
  }
  return results;
}

double AttentionBatch::error() const {
  double worst = 0;
  for (int32_t r = 0; r < batch_size(); ++r) {
    for (int32_t i = 0; i < n_.qo_lens[index(r)]; ++i) {
      for (int32_t h = 0; h < num_heads(); ++h) worst = std::max(worst, error_of_row(r, i, h));
    }
  }
  return worst;
}

std::vector<int64_t> AttentionBatch::keys_of(int32_t request, int32_t query) const {
  const int32_t position = kv_len(request) - n_.qo_lens[index(request)] + query;
  const KeySpan seen = n_.mask.visible(position, {0, kv_len(request)});
  const int64_t token = first_tokens_[index(request)] + query;
  std::vector<int64_t> keys;
  for (int32_t key = seen.begin; key < seen.end; ++key) {
    if (!places_.has_key(request, key)) continue;
    const bool is_masked =
        n_.has_mask && (mask_[index(token * mask_words_ + key / 32)] >> key % 32 & 1) == 0;
    if (!is_masked) keys.push_back(places_.row(request, key));
  }
  return keys;
}

double AttentionBatch::error_of_row(int32_t request, int32_t query, int32_t head) const {
  const int64_t row = int64_t{first_tokens_[index(request)] + query} * num_heads() + head;
  const int32_t kv_head = head / n_.group_size;
  const std::vector<int64_t> keys = keys_of(request, query);
  std::vector<float> q(q_.numbers(row), q_.numbers(row) + q_.dims());
  if (n_.q_tail_dims > 0) {
    q.insert(q.end(), q_tail_.numbers(row), q_tail_.numbers(row) + q_tail_.dims());
  }
  double scale = n_.logits_scale;
  if (!n_.k_scales.empty()) scale *= n_.k_scales[index(kv_head)];
  if (!n_.q_scales.empty()) scale *= n_.q_scales[index(kv_head)];
  std::vector<double> logits;
  double largest = n_.has_sinks ? kSink : -HUGE_VAL;
  for (const int64_t key : keys) {
    double x = dot(q.data(), k_.numbers(key * n_.num_kv_heads + kv_head), k_.dims());
    if (n_.k_tail_dims > 0) x += dot(&q[index(k_.dims())], k_tail_.numbers(key), k_tail_.dims());
    x *= scale;
    logits.push_back(n_.softcap > 0 ? n_.softcap * std::tanh(x / n_.softcap) : x);
    largest = std::max(largest, logits.back());
  }
  double sum = n_.has_sinks ? std::exp(kSink - largest) : 0;
  std::vector<double> wanted(index(n_.head_dim_vo), 0.0);
  for (size_t i = 0; i < keys.size(); ++i) {
    const double weight = std::exp(logits[i] - largest);
    sum += weight;
    const float* value = (n_.shared_kv ? k_ : v_).numbers(keys[i] * n_.num_kv_heads + kv_head);
    for (size_t d = 0; d < wanted.size(); ++d) wanted[d] += weight * value[d];
  }
  double size = 0.1;
  for (double& x : wanted) {
    x = sum == 0 ? 0 : x / sum;
    size = std::max(size, std::isnan(x) ? 0 : std::fabs(x));
  }
  const double lse = sum == 0 ? -HUGE_VAL : largest + std::log(sum);
  double worst = distance(lse_[index(row)], lse);
  for (int32_t d = 0; d < n_.head_dim_vo; ++d) {
    worst = std::max(worst, distance(o_.load(row, d), kVScale * wanted[index(d)]) / size);
  }
  return worst;
}

}  // namespace flashplan::test
