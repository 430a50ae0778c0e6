// SPDX-License-Identifier: Apache-2.0
// A random attention problem on the CPU with its tensors, and the exact result by a double loop.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "flashplan/flashplan.h"
#include "host_tensor.h"
#include "random_batch.h"

namespace flashplan::test {

/// 256-byte aligned memory full of NaN.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes) : memory_(bytes + 256, std::byte{0xff}), bytes_(bytes) {}
  void* data() {
    void* pointer = memory_.data();
    std::size_t space = memory_.size();
    return std::align(256, bytes_, pointer, space);
  }
  std::size_t size() const { return bytes_; }

 private:
  std::vector<std::byte> memory_;
  std::size_t bytes_;
};

struct Problem {
  AttentionOptions options;
  HostBatch batch;
  std::vector<int32_t> planned_lens;  // upper bounds of batch.kv_lens; empty: those themselves
  std::vector<int32_t> kv_indptr;     // empty: not given
  std::vector<int32_t> mask_begin;    // likewise
  HostTensor q, k, v;
  // Of rank 0 where not used.
  HostTensor block_table, page_indptr, page_indices, kv_lens, mask, sinks, k_scales, v_scales;
  std::vector<std::vector<int32_t>> pages;  // ids of each request
  float k_scale = 1.0F;
  float v_scale = 1.0F;

  Batch batch_view() const {
    Batch view = batch.view();
    if (!planned_lens.empty()) view.kv_lens = planned_lens.data();
    if (!kv_indptr.empty()) view.kv_indptr = kv_indptr.data();
    if (!mask_begin.empty()) view.mask_begin = mask_begin.data();
    return view;
  }
  int64_t kv_begin(int32_t request) const {
    if (!kv_indptr.empty()) return kv_indptr[static_cast<size_t>(request)];
    const std::vector<int32_t>& lens = planned_lens.empty() ? batch.kv_lens : planned_lens;
    return std::accumulate(lens.begin(), lens.begin() + request, int64_t{0});
  }
};

/// Outputs of one run, with rows beyond those planned.
struct Outputs {
  HostTensor o, lse;

  explicit Outputs(const Problem& p, int64_t pad = 0)
      : o(p.options.o_dtype,
          {p.batch.qo_tokens() + 2, p.options.num_qo_heads, p.options.head_dim_vo}, pad),
        lse(DType::kFloat32, {p.batch.qo_tokens() + 2, p.options.num_qo_heads}, pad) {}
  bool operator==(const Outputs& other) const {
    return o.bytes() == other.o.bytes() && lse.bytes() == other.lse.bytes();
  }
};

inline AttentionTensors tensors_of(const Problem& p, const Outputs& out, Workspace& workspace) {
  AttentionTensors t;
  t.q = p.q.view();
  t.k = p.k.view();
  t.v = p.v.view();
  t.block_table = p.block_table.view();
  t.page_indptr = p.page_indptr.view();
  t.page_indices = p.page_indices.view();
  t.kv_lens = p.kv_lens.view();
  t.mask = p.mask.view();
  t.sinks = p.sinks.view();
  t.k_scales = p.k_scales.view();
  t.v_scales = p.v_scales.view();
  t.o = out.o.view();
  t.lse = out.lse.view();
  t.k_scale = p.k_scale;
  t.v_scale = p.v_scale;
  t.workspace = workspace.data();
  t.workspace_bytes = workspace.size();
  return t;
}

/// Where an element of K or V lies.
inline Index kv_index(const Problem& p, int32_t request, int64_t key, int64_t head, int64_t d) {
  const int32_t page_size = p.options.page_size;
  if (page_size == 0) return {p.kv_begin(request) + key, head, d};
  const int64_t page = p.pages[static_cast<size_t>(request)][static_cast<size_t>(key / page_size)];
  const int64_t slot = key % page_size;
  const bool nhd = p.options.kv_layout == KvLayout::kNHD;
  return nhd ? Index{page, slot, head, d} : Index{page, head, slot, d};
}

/// Deals distinct pages in random order. Returns how many pages there are.
inline int64_t deal_pages(Random& random, Problem& p) {
  const int32_t page_size = p.options.page_size;
  int32_t needed = 0;
  int32_t columns = random.between(0, 2);
  for (int32_t r = 0; r < p.batch.size(); ++r) {
    const auto pages_of = [&](int32_t len) { return (len + page_size - 1) / page_size; };
    needed += pages_of(p.batch.kv_lens[static_cast<size_t>(r)]);
    columns = std::max(columns, pages_of(p.batch_view().kv_lens[r]) + random.between(0, 1));
  }
  std::vector<int32_t> ids(static_cast<size_t>(needed) + 3);
  std::iota(ids.begin(), ids.end(), 0);
  for (size_t i = ids.size() - 1; i > 0; --i) {
    std::swap(ids[i], ids[static_cast<size_t>(random.between(0, static_cast<int32_t>(i)))]);
  }

  p.block_table = HostTensor(DType::kInt32, {p.batch.size(), columns});
  std::vector<int32_t> indices;
  std::vector<int32_t> indptr = {0};
  for (int32_t r = 0; r < p.batch.size(); ++r) {
    const int32_t len = p.batch.kv_lens[static_cast<size_t>(r)];
    const auto first = ids.begin() + indptr.back();
    p.pages.emplace_back(first, first + (len + page_size - 1) / page_size);
    const std::vector<int32_t>& pages = p.pages.back();
    for (int32_t c = 0; c < columns; ++c) {
      const bool used = c < static_cast<int32_t>(pages.size());
      p.block_table.set_bits(
          {r, c}, used ? static_cast<uint32_t>(pages[static_cast<size_t>(c)]) : 0x7fffffffU);
    }
    indices.insert(indices.end(), pages.begin(), pages.end());
    indptr.push_back(static_cast<int32_t>(indices.size()));
  }
  if (random.one_in(2)) {
    p.block_table = HostTensor();
    p.page_indptr = int_tensor(indptr);
    p.page_indices = int_tensor(indices);
  }
  return static_cast<int64_t>(ids.size());
}

/// Places the keys of p.batch. K and V are random where a request has keys, NaN elsewhere.
inline void fill_kv(Random& random, Problem& p) {
  const AttentionOptions& o = p.options;
  std::vector<int64_t> shape;
  if (o.page_size > 0) {
    shape = {deal_pages(random, p), o.page_size, o.num_kv_heads, 0};
    if (o.kv_layout == KvLayout::kHND) std::swap(shape[1], shape[2]);
  } else {
    if (random.one_in(2)) {
      p.kv_indptr = {random.between(0, 3)};
      const Batch planned = p.batch_view();
      for (int32_t r = 0; r < planned.batch_size; ++r) {
        p.kv_indptr.push_back(p.kv_indptr.back() + planned.kv_lens[r] + random.between(0, 3));
      }
    }
    shape = {p.kv_begin(p.batch.size()) + 1, o.num_kv_heads, 0};
  }
  const int64_t pad = random.pick({0, 0, 8});
  for (const auto& [kv, dim] : {std::pair{&p.k, o.head_dim_qk}, std::pair{&p.v, o.head_dim_vo}}) {
    shape.back() = dim;
    *kv = HostTensor(o.kv_dtype, shape, pad);
    for (int32_t r = 0; r < p.batch.size(); ++r) {
      for (int64_t key = 0; key < p.batch.kv_lens[static_cast<size_t>(r)]; ++key) {
        for (int64_t head = 0; head < o.num_kv_heads; ++head) {
          for (int64_t d = 0; d < dim; ++d) {
            kv->set(kv_index(p, r, key, head, d), random_element(random));
          }
        }
      }
    }
  }
}

/// Options of every kind with small sizes; the caller adds requests, then calls fill_problem().
inline Problem random_problem(Random& random) {
  Problem p;
  AttentionOptions& o = p.options;
  o.num_kv_heads = random.between(1, 3);
  o.num_qo_heads = o.num_kv_heads * random.pick({1, 2, 3, 5, 8});
  o.head_dim_qk = random.pick({1, 3, 16, 24, 64});
  o.head_dim_vo = random.one_in(2) ? o.head_dim_qk : random.pick({1, 5, 17, 32});
  o.page_size = random.pick({0, 0, 1, 3, 16});
  o.kv_layout = random.one_in(2) ? KvLayout::kNHD : KvLayout::kHND;
  o.q_dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  o.o_dtype = random.pick({o.q_dtype, DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  o.kv_dtype = o.q_dtype;
  if (random.one_in(4)) {
    o.kv_dtype = random.pick({DType::kFloat8E4M3, DType::kFloat8E5M2});
    p.k_scale = 0.5F;
    p.v_scale = 1.5F;
  }
  o.causal = !random.one_in(3);
  o.window_left = random.one_in(3) ? random.between(0, 90) : -1;
  o.softcap = random.one_in(3) ? 3.0F : 0.0F;
  if (random.one_in(4)) o.softmax_scale = 0.3F;
  o.num_ctas = random.pick({0, 1, 2, 7, 40});
  o.batch_invariant = random.one_in(4);
  return p;
}

/// Lets plans be made for up to `most` more keys; p.batch keeps the real lengths, which run() gets.
/// Must be called before fill_problem().
inline void plan_upper_bounds(Random& random, Problem& p, int32_t most) {
  std::vector<int32_t> on_device;
  for (const int32_t len : p.batch.kv_lens) {
    const int32_t planned = len + (random.one_in(4) ? 0 : random.between(0, most));
    p.planned_lens.push_back(planned);
    // A length beyond the planned one counts as that one, a negative one as 0.
    const int32_t beyond = random.pick({len, len + 1, INT32_MAX});
    on_device.push_back(planned == len ? beyond : len == 0 ? random.pick({0, -1, INT32_MIN}) : len);
  }
  p.kv_lens = int_tensor(on_device);
}

/// Gives p.batch a mask of random bits. Must be called after plan_upper_bounds().
inline void add_mask(Random& random, Problem& p) {
  p.options.custom_mask = true;
  const bool default_begin = random.one_in(2);
  const Batch planned = p.batch_view();
  int32_t num_bits = 0;
  for (int32_t r = 0; r < planned.batch_size; ++r) {
    const int32_t kv_len = planned.kv_lens[r];
    if (!default_begin) p.mask_begin.push_back(random.between(0, kv_len + 1));
    num_bits = std::max(num_bits, default_begin ? p.batch.qo_len(r) : kv_len - p.mask_begin.back());
  }
  p.mask = HostTensor(DType::kUInt32, {p.batch.qo_tokens() + 2, (num_bits + 31) / 32},
                      random.pick({0, 3}));
  for (int64_t row = 0; row < p.mask.size(0); ++row) {
    for (int64_t i = 0; i < p.mask.size(1); ++i) {
      const auto half = [&] { return static_cast<uint32_t>(random.between(0, 0xffff)); };
      p.mask.set_bits({row, i}, half() << 16 | half());
    }
  }
}

/// Gives each query head a sink.
inline void add_sinks(Random& random, Problem& p) {
  p.sinks = HostTensor(DType::kFloat32, {p.options.num_qo_heads});
  for (int64_t head = 0; head < p.options.num_qo_heads; ++head) {
    p.sinks.set({head}, random.one_in(8) ? -HUGE_VAL : 2 * random_element(random));
  }
}

/// Gives the kv heads scales of their own, or all of them one.
inline void add_head_scales(Random& random, Problem& p) {
  for (HostTensor* scales : {&p.k_scales, &p.v_scales}) {
    const int64_t count = random.one_in(2) ? 1 : p.options.num_kv_heads;
    *scales = HostTensor(DType::kFloat32, {count});
    for (int64_t head = 0; head < count; ++head) {
      scales->set({head}, random.pick({0.25F, 0.5F, 1.0F, 1.5F}));
    }
  }
}

/// What a kv head's keys or values are multiplied with: `scale` and what `scales` has for it.
inline double scale_of_head(double scale, const HostTensor& scales, int64_t head) {
  if (scales.view().empty()) return scale;
  return scale * scales.get({scales.size(0) == 1 ? 0 : head});
}

/// Whether the mask lets a query of a request, which is row `token` of q, see a key.
inline bool mask_lets_see(const Problem& p, int32_t request, int64_t token, int64_t key) {
  if (!p.options.custom_mask) return true;
  const auto r = static_cast<size_t>(request);
  const int64_t begin =
      p.mask_begin.empty() ? p.batch.kv_lens[r] - p.batch.qo_len(request) : p.mask_begin[r];
  if (key < begin) return true;
  return (p.mask.bits({token, (key - begin) / 32}) >> (key - begin) % 32 & 1) != 0;
}

inline void fill_problem(Random& random, Problem& p) {
  p.options.max_batch_size = std::max(p.batch.size(), 1);
  p.options.max_qo_tokens = std::max(p.batch.qo_tokens(), 1);
  p.q = HostTensor(p.options.q_dtype,
                   {p.batch.qo_tokens() + 2, p.options.num_qo_heads, p.options.head_dim_qk},
                   random.pick({0, 0, 4}));
  fill_random(random, p.q, p.batch.qo_tokens());
  fill_kv(random, p);
}

/// The keys or values of a kv head of a request, `dim` numbers each. Decoded once, since most of
/// the time of a test is spent on decoding.
inline std::vector<double> rows_of_head(const Problem& p, const HostTensor& kv, int32_t request,
                                        int64_t head, int64_t dim) {
  const int64_t kv_len = p.batch.kv_lens[static_cast<size_t>(request)];
  std::vector<double> rows;
  rows.reserve(static_cast<size_t>(kv_len * dim));
  for (int64_t key = 0; key < kv_len; ++key) {
    for (int64_t d = 0; d < dim; ++d) rows.push_back(kv.get(kv_index(p, request, key, head, d)));
  }
  return rows;
}

/// Compares the rows of one kv head of a request with the definition.
inline std::string wrong_head(const Problem& p, const Outputs& out, int32_t request,
                              int64_t kv_head) {
  const AttentionOptions& o = p.options;
  const int64_t group_size = o.num_qo_heads / o.num_kv_heads;
  const int64_t qo_len = p.batch.qo_len(request);
  const int64_t kv_len = p.batch.kv_lens[static_cast<size_t>(request)];
  const std::vector<double> k = rows_of_head(p, p.k, request, kv_head, o.head_dim_qk);
  const std::vector<double> v = rows_of_head(p, p.v, request, kv_head, o.head_dim_vo);
  const double scale =
      (o.softmax_scale ? double{*o.softmax_scale} : 1.0 / std::sqrt(double(o.head_dim_qk))) *
      scale_of_head(p.k_scale, p.k_scales, kv_head);
  const double v_scale = scale_of_head(p.v_scale, p.v_scales, kv_head);
  std::vector<double> q(static_cast<size_t>(o.head_dim_qk));
  std::vector<double> want(static_cast<size_t>(o.head_dim_vo));
  const auto where = [](int64_t token, int64_t head, double got, double right) {
    return "token " + std::to_string(token) + " head " + std::to_string(head) + ": got " +
           std::to_string(got) + ", want " + std::to_string(right);
  };
  for (int64_t row = 0; row < qo_len * group_size; ++row) {
    const int64_t i = row / group_size;
    const int64_t token = p.batch.qo_indptr[static_cast<size_t>(request)] + i;
    const int64_t head = kv_head * group_size + row % group_size;
    const int64_t diagonal = i + kv_len - qo_len;
    for (size_t d = 0; d < q.size(); ++d) q[d] = p.q.get({token, head, static_cast<int64_t>(d)});
    std::fill(want.begin(), want.end(), 0.0);
    double sum = p.sinks.view().empty() ? 0.0 : std::exp(p.sinks.get({head}));
    for (int64_t key = 0; key < kv_len; ++key) {
      if (o.causal && key > diagonal) continue;
      if (o.window_left >= 0 && key < diagonal - o.window_left) continue;
      if (!mask_lets_see(p, request, token, key)) continue;
      const double* k_row = k.data() + key * o.head_dim_qk;
      const double* v_row = v.data() + key * o.head_dim_vo;
      double logit = std::inner_product(q.begin(), q.end(), k_row, 0.0) * scale;
      if (o.softcap > 0) logit = o.softcap * std::tanh(logit / o.softcap);
      // Small inputs do not overflow, so an infinite result counts as NaN.
      const double weight = logit == HUGE_VAL ? NAN : std::exp(logit);
      sum += weight;
      for (size_t d = 0; d < want.size(); ++d) want[d] += weight * v_scale * v_row[d];
    }
    for (size_t d = 0; d < want.size(); ++d) {
      const double value = sum == 0 ? 0.0 : want[d] / sum;
      const double got = out.o.get({token, head, static_cast<int64_t>(d)});
      // Where values that are not finite have only weights of 0, the result may be NaN or not.
      if (sum == 0 && std::isnan(want[d]) && std::isnan(got)) continue;
      if (!std::isfinite(value) && (std::isnan(got) || got == value)) continue;
      const double tolerance = 1e-5 + 2 * rounding_error(o.o_dtype) * std::fabs(value);
      if (!(std::fabs(got - value) <= tolerance)) return "o " + where(token, head, got, value);
    }
    const double lse = std::log(sum);
    const double got = out.lse.get({token, head});
    if (std::isnan(lse) && std::isnan(got)) continue;
    if (!(got == lse || std::fabs(got - lse) <= 2e-5 * std::max(1.0, std::fabs(lse)))) {
      return "lse " + where(token, head, got, lse);
    }
  }
  return "";
}

/// Compares every planned row with the definition, and the rows beyond with what they were.
inline std::string wrong_output(const Problem& p, const Outputs& out) {
  const AttentionOptions& o = p.options;
  for (int32_t r = 0; r < p.batch.size(); ++r) {
    for (int64_t kv_head = 0; kv_head < o.num_kv_heads; ++kv_head) {
      const std::string wrong = wrong_head(p, out, r, kv_head);
      if (!wrong.empty()) return wrong;
    }
  }
  for (int64_t row = p.batch.qo_tokens(); row < out.o.size(0); ++row) {
    for (int64_t head = 0; head < o.num_qo_heads; ++head) {
      for (int64_t d = 0; d < o.head_dim_vo; ++d) {
        if (!std::isnan(out.o.get({row, head, d}))) return "o was written beyond the planned rows";
      }
      if (!std::isnan(out.lse.get({row, head}))) return "lse was written beyond the planned rows";
    }
  }
  return "";
}

/// Calls create(), plan() and run(). Returns the first error message, or an empty text.
inline std::string run_problem(const Problem& p, Outputs& out) {
  Plan plan;
  Status status = Plan::create(p.options, &plan);
  if (status.ok()) status = plan.plan(p.batch_view());
  Workspace workspace(plan.workspace_bytes());
  if (status.ok()) status = plan.run(tensors_of(p, out, workspace));
  return status.message;
}

}  // namespace flashplan::test
