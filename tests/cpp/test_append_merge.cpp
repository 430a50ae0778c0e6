// SPDX-License-Identifier: Apache-2.0
// append_paged_kv() and merge_states() against plain loops.
#include <algorithm>
#include <array>
#include <cfenv>
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "flashplan/flashplan.h"
#include "problem.h"
#include "refusal.h"

namespace flashplan::test {
namespace {

/// A problem over a paged cache and the last new_lens[r] keys of its requests as new tokens.
struct Append {
  Problem p;
  std::vector<int32_t> indptr = {0};
  HostTensor k, v, indptr_tensor, kv_lens;

  AppendTensors tensors() const {
    AppendTensors t;
    t.k = k.view();
    t.v = v.view();
    t.k_cache = p.k.view();
    t.v_cache = p.v.view();
    t.indptr = indptr_tensor.view();
    t.kv_lens = kv_lens.view();
    t.block_table = p.block_table.view();
    t.page_indptr = p.page_indptr.view();
    t.page_indices = p.page_indices.view();
    t.layout = p.options.kv_layout;
    t.k_scale = p.k_scale;
    t.v_scale = p.v_scale;
    t.k_scales = p.k_scales.view();
    t.v_scales = p.v_scales.view();
    return t;
  }
};

Append random_append(Random& random) {
  Append a;
  a.p = random_problem(random);
  if (a.p.options.page_size == 0) a.p.options.page_size = 4;
  const int32_t batch_size = random.between(1, 5);
  for (int32_t r = 0; r < batch_size; ++r) {
    const int32_t kv_len = random.between(0, 50);
    a.p.batch.add(1, kv_len);
    a.indptr.push_back(a.indptr.back() + random.between(0, kv_len));
  }
  fill_problem(random, a.p);
  if (random.one_in(3)) add_head_scales(random, a.p);
  const AttentionOptions& o = a.p.options;
  const int64_t rows = a.indptr.back() + 1;
  a.k = HostTensor(o.q_dtype, {rows, o.num_kv_heads, o.head_dim_qk}, random.pick({0, 4}));
  a.v = HostTensor(o.q_dtype, {rows, o.num_kv_heads, o.head_dim_vo}, random.pick({0, 4}));
  fill_random(random, a.k, rows - 1);
  fill_random(random, a.v, rows - 1);
  a.indptr_tensor = int_tensor(a.indptr);
  a.kv_lens = int_tensor(a.p.batch.kv_lens);
  return a;
}

TEST(append_writes_the_new_tokens_and_nothing_else) {
  Random random(1);
  for (int i = 0; i < 200; ++i) {
    Append a = random_append(random);
    HostTensor want_k = a.p.k;
    HostTensor want_v = a.p.v;
    const auto expect = [&](HostTensor& cache, const HostTensor& rows, float scale,
                            const HostTensor& scales) {
      for (int32_t r = 0; r < a.p.batch.size(); ++r) {
        const int32_t first = a.indptr[static_cast<size_t>(r)];
        const int32_t count = a.indptr[static_cast<size_t>(r) + 1] - first;
        for (int64_t j = 0; j < count; ++j) {
          const int64_t key = a.p.batch.kv_lens[static_cast<size_t>(r)] - count + j;
          for (int64_t head = 0; head < rows.size(1); ++head) {
            for (int64_t d = 0; d < rows.size(2); ++d) {
              const auto value = static_cast<float>(rows.get({first + j, head, d}));
              cache.set(kv_index(a.p, r, key, head, d),
                        value / static_cast<float>(scale_of_head(scale, scales, head)));
            }
          }
        }
      }
    };
    expect(want_k, a.k, a.p.k_scale, a.p.k_scales);
    expect(want_v, a.v, a.p.v_scale, a.p.v_scales);
    CHECK_EQ(append_paged_kv(a.tensors()).message, std::string());
    CHECK(a.p.k.bytes() == want_k.bytes());
    CHECK(a.p.v.bytes() == want_v.bytes());
  }
}

TEST(append_to_slots_is_append_to_pages) {
  Random random(4);
  for (int i = 0; i < 100; ++i) {
    Append a = random_append(random);
    const HostTensor before_k = a.p.k;
    const HostTensor before_v = a.p.v;
    CHECK_EQ(append_paged_kv(a.tensors()).message, std::string());
    const HostTensor want_k = a.p.k;
    const HostTensor want_v = a.p.v;
    a.p.k = before_k;
    a.p.v = before_v;
    const int64_t page_size = a.p.options.page_size;
    std::vector<int64_t> slots;
    for (int32_t r = 0; r < a.p.batch.size(); ++r) {
      const auto index = static_cast<size_t>(r);
      const int32_t count = a.indptr[index + 1] - a.indptr[index];
      for (int32_t j = 0; j < count; ++j) {
        const int64_t key = a.p.batch.kv_lens[index] - count + j;
        const bool nhd = a.p.options.kv_layout == KvLayout::kNHD;
        const Index place = kv_index(a.p, r, key, 0, 0);
        slots.push_back(place[0] * page_size + place[nhd ? 1 : 2]);
      }
    }
    AppendTensors t = a.tensors();
    t.indptr = t.kv_lens = t.block_table = t.page_indptr = t.page_indices = TensorView();
    slots.push_back(-1);  // the row of k and v behind the tokens
    t.slot_mapping =
        contiguous(slots.data(), DType::kInt64, Device(), {static_cast<int64_t>(slots.size())});
    CHECK_EQ(append_paged_kv(t).message, std::string());
    CHECK(a.p.k.bytes() == want_k.bytes());
    CHECK(a.p.v.bytes() == want_v.bytes());
    slots.back() = page_size * std::min(t.k_cache.shape[0], t.v_cache.shape[0]);
    const std::string last = "slot_mapping[" + std::to_string(slots.size() - 1) + "]";
    check_refused(append_paged_kv(t), StatusCode::kInvalidArgument, last);
    t.kv_lens = a.kv_lens.view();
    check_refused(append_paged_kv(t), StatusCode::kInvalidArgument, "slot_mapping");
  }
}

TEST(rope_append_is_rope_and_append) {
  Random random(5);
  for (int i = 0; i < 100; ++i) {
    Append a = random_append(random);
    AppendTensors t = a.tensors();
    const int64_t head_dim = a.k.size(2);
    const int64_t tokens = a.indptr.back();
    HostTensor q(a.k.dtype(), {tokens + 1, 3, head_dim}, random.pick({0, 4}));
    fill_random(random, q, tokens + 1);
    HostTensor out(q.dtype(), {tokens + 1, 3, head_dim}, random.pick({0, 4}));
    Rope rope;
    rope.interleaved = random.one_in(2);
    if (head_dim < 2 || head_dim % 2 != 0) {
      CHECK(!rope_append_paged_kv(q.view(), t, rope, out.view()).ok());
      continue;
    }
    std::vector<int32_t> positions;
    for (int32_t r = 0; r < a.p.batch.size(); ++r) {
      const auto index = static_cast<size_t>(r);
      const int32_t count = a.indptr[index + 1] - a.indptr[index];
      for (int32_t j = 0; j < count; ++j) {
        positions.push_back(a.p.batch.kv_lens[index] - count + j);
      }
    }
    positions.push_back(0);
    HostTensor want_q = q;
    HostTensor want_rows = a.k;
    CHECK_EQ(apply_rope(q.view(), a.k.view(), int_tensor(positions).view(), rope, want_q.view(),
                        want_rows.view())
                 .message,
             std::string());
    HostTensor want_k = a.p.k;
    HostTensor want_v = a.p.v;
    AppendTensors apart = t;
    apart.k = want_rows.view();
    apart.k_cache = want_k.view();
    apart.v_cache = want_v.view();
    CHECK_EQ(append_paged_kv(apart).message, std::string());
    CHECK_EQ(rope_append_paged_kv(q.view(), t, rope, out.view()).message, std::string());
    CHECK(a.p.k.bytes() == want_k.bytes());
    CHECK(a.p.v.bytes() == want_v.bytes());
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t d = 0; d < head_dim; ++d) {
        CHECK_EQ(out.bits({token, 2, d}), want_q.bits({token, 2, d}));
      }
    }
    t.slot_mapping = a.kv_lens.view();
    CHECK(!rope_append_paged_kv(q.view(), t, rope, out.view()).ok());
  }
}

TEST(append_saturates_in_8_bit_formats) {
  for (const auto& [dtype, largest] :
       {std::pair{DType::kFloat8E4M3, 448.0}, std::pair{DType::kFloat8E5M2, 57344.0}}) {
    HostTensor k(DType::kFloat32, {4, 1, 1});
    k.set({0, 0, 0}, 1e9);
    k.set({1, 0, 0}, -1e9);
    k.set({2, 0, 0}, largest * 1.01);
    HostTensor cache(dtype, {1, 4, 1, 1});
    HostTensor unused(dtype, {1, 4, 1, 1});
    const HostTensor indptr = int_tensor({0, 4});
    const HostTensor kv_lens = int_tensor({4});
    HostTensor table(DType::kInt32, {1, 1});
    table.set_bits({0, 0}, 0);
    AppendTensors t;
    t.k = t.v = k.view();
    t.k_cache = cache.view();
    t.v_cache = unused.view();
    t.indptr = indptr.view();
    t.kv_lens = kv_lens.view();
    t.block_table = table.view();
    CHECK_EQ(append_paged_kv(t).message, std::string());
    CHECK_EQ(cache.get({0, 0, 0, 0}), largest);
    CHECK_EQ(cache.get({0, 1, 0, 0}), -largest);
    CHECK_EQ(cache.get({0, 2, 0, 0}), largest);
    CHECK(std::isnan(cache.get({0, 3, 0, 0})));
  }
}

TEST(a_failed_append_writes_nothing) {
  Random random(2);
  for (int i = 0; i < 50; ++i) {
    Append a = random_append(random);
    const std::vector<std::byte> k = a.p.k.bytes();
    const std::vector<std::byte> v = a.p.v.bytes();
    const auto fails = [&](const AppendTensors& t) {
      CHECK(!append_paged_kv(t).ok());
      CHECK(a.p.k.bytes() == k);
      CHECK(a.p.v.bytes() == v);
    };
    AppendTensors t = a.tensors();
    t.v.shape[1] += 1;
    fails(t);
    t = a.tensors();
    t.v_cache.read_only = true;
    fails(t);
    t = a.tensors();
    t.k_scale = 0.0F;
    fails(t);
    t = a.tensors();
    std::vector<int32_t> lens = a.p.batch.kv_lens;
    lens.back() = a.indptr.back() - a.indptr[a.indptr.size() - 2] - 1;  // fewer than are new
    const HostTensor bad_lens = int_tensor(lens);
    t.kv_lens = bad_lens.view();
    fails(t);
    t = a.tensors();
    std::vector<int32_t> indptr = a.indptr;
    indptr.back() += 2;  // beyond k and v
    const HostTensor bad_indptr = int_tensor(indptr);
    t.indptr = bad_indptr.view();
    fails(t);
  }
}

struct State {
  HostTensor o, lse;
  AttentionState view() const { return {o.view(), lse.view()}; }
};

State random_state(Random& random, DType dtype, const std::array<int64_t, 3>& shape) {
  State s{HostTensor(dtype, {shape[0], shape[1], shape[2]}, random.pick({0, 3})),
          HostTensor(DType::kFloat32, {shape[0], shape[1]})};
  fill_random(random, s.o, shape[0]);
  for (int64_t token = 0; token < shape[0]; ++token) {
    for (int64_t head = 0; head < shape[1]; ++head) {
      s.lse.set({token, head}, 20 * random.unit() - 10);
      if (!random.one_in(4)) continue;
      s.lse.set_bits({token, head}, 0xff800000U);  // -inf: no keys
      for (int64_t d = 0; d < shape[2]; ++d) s.o.set({token, head, d}, 0.0);
    }
  }
  return s;
}

TEST(merges_round_to_nearest_whatever_their_caller_does) {
  Random random(4);
  const State a = random_state(random, DType::kFloat16, {3, 2, 64});
  const State b = random_state(random, DType::kFloat16, {3, 2, 64});
  const State expected = a, merged = a;
  const AttentionState states[] = {a.view(), b.view()};
  CHECK(merge_states(states, 2, expected.view()).ok());
  std::fesetround(FE_UPWARD);
  CHECK(merge_states(states, 2, merged.view()).ok());
  CHECK_EQ(std::fegetround(), FE_UPWARD);
  std::fesetround(FE_TONEAREST);
  CHECK(merged.o.bytes() == expected.o.bytes());
  CHECK(merged.lse.bytes() == expected.lse.bytes());
}

TEST(merge_of_random_states) {
  Random random(3);
  for (int i = 0; i < 300; ++i) {
    const DType dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
    const std::array<int64_t, 3> shape = {random.between(0, 5), random.between(1, 4),
                                          random.pick({1, 7, 64})};
    std::vector<State> states;
    std::vector<AttentionState> views;
    const int32_t num_states = random.pick({1, 2, 3, 9});
    for (int32_t s = 0; s < num_states; ++s) states.push_back(random_state(random, dtype, shape));
    for (const State& s : states) views.push_back(s.view());
    const std::vector<State> inputs = states;
    const State apart = random_state(random, dtype, shape);
    const State& out = random.one_in(2) ? states[static_cast<size_t>(i) % states.size()] : apart;
    const Status status = merge_states(views.data(), num_states, out.view());
    CHECK_EQ(status.message, std::string());

    for (int64_t token = 0; token < shape[0]; ++token) {
      for (int64_t head = 0; head < shape[1]; ++head) {
        double sum = 0;
        for (const State& s : inputs) sum += std::exp(s.lse.get({token, head}));
        const double lse = std::log(sum);
        const double got = out.lse.get({token, head});
        CHECK(got == lse || std::fabs(got - lse) <= 1e-5);
        for (int64_t d = 0; d < shape[2]; ++d) {
          double want = 0;
          for (const State& s : inputs) {
            want += std::exp(s.lse.get({token, head})) * s.o.get({token, head, d});
          }
          want = sum > 0 ? want / sum : 0;
          const double error = std::fabs(out.o.get({token, head, d}) - want);
          CHECK(error <= 3e-6 + 1.01 * rounding_error(dtype) * std::fabs(want));
        }
      }
    }
  }
}

TEST(merge_refuses_what_it_cannot_do) {
  Random random(4);
  const State a = random_state(random, DType::kFloat32, {3, 2, 8});
  const State b = random_state(random, DType::kFloat32, {3, 2, 8});
  const State out = random_state(random, DType::kFloat32, {3, 2, 8});
  const std::vector<std::byte> before = out.o.bytes();
  const auto refused = [&](const AttentionState& second, const AttentionState& to, int32_t count) {
    const AttentionState states[] = {a.view(), second};
    CHECK(!merge_states(states, count, to).ok());
    CHECK(out.o.bytes() == before);
  };
  refused(b.view(), out.view(), 0);
  refused(b.view(), out.view(), -1);
  AttentionState bad = b.view();
  bad.o.shape[2] = 4;
  refused(bad, out.view(), 2);
  bad = b.view();
  bad.lse.dtype = DType::kFloat16;
  refused(bad, out.view(), 2);
  bad = b.view();
  bad.o.dtype = DType::kFloat16;
  refused(bad, out.view(), 2);
  bad = b.view();
  bad.lse.device = {DeviceType::kCuda, 0};
  refused(bad, out.view(), 2);
  bad = out.view();
  bad.o.read_only = true;
  refused(b.view(), bad, 2);
  bad = out.view();  // a part of an input
  bad.o.data = static_cast<float*>(a.o.view().data) + 1;
  refused(b.view(), bad, 2);
  refused(b.view(), out.view(), 0);
}

TEST(merge_on_cuda_refuses_many_states_that_are_not_one_stack) {
  Random random(5);
  std::vector<State> states;
  std::vector<AttentionState> views;
  for (int i = 0; i < 66; ++i) states.push_back(random_state(random, DType::kFloat32, {2, 1, 4}));
  for (State& s : states) {
    views.push_back(s.view());
    views.back().o.device = views.back().lse.device = {DeviceType::kCuda, 0};
  }
  // Memory of one state within another, so that they cannot be evenly spaced.
  views[64].o.data = static_cast<float*>(views[0].o.data) + 4;
  const Status status = merge_states(views.data(), 65, views[65]);
  CHECK(status.code == StatusCode::kUnsupported);  // without CUDA: any states at all
}

}  // namespace
}  // namespace flashplan::test
