// SPDX-License-Identifier: Apache-2.0
// Norms, activations, rotations and softmax of the C interface do what those of the C++ one do, and
// refuse what it refuses.
#include <cstring>

#include "c_operators.h"
#include "c_structs.h"
#include "check.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c_ops.h"
#include "host_tensor.h"
#include "refusal.h"

namespace flashplan::test {
namespace {

const auto kInvalid = StatusCode::kInvalidArgument;

TEST(norms) {
  const HostTensor x = random_tensor(1, DType::kFloat16, {3, 2, 40});
  const HostTensor weight = random_tensor(2, DType::kFloat16, {40});
  const HostTensor bias = random_tensor(3, DType::kFloat16, {40});
  CTensors owner;
  const flashplan_tensor* c_x = owner.add(x.view());
  const flashplan_tensor* c_weight = owner.add(weight.view());
  const flashplan_tensor* c_bias = owner.add(bias.view());
  const HostTensor wanted(DType::kFloat16, {3, 2, 40}), out(DType::kFloat16, {3, 2, 40});
  const flashplan_tensor* c_out = owner.add(out.view());
  Message message;
  for (const bool gemma : {false, true}) {
    const RmsNormOptions options{0.25F, gemma};
    CHECK(rmsnorm(x.view(), weight.view(), wanted.view(), options).ok());
    check_ok(flashplan_rmsnorm(c_x, c_weight, c_out, 0.25F, gemma ? 2 : 0, nullptr, message),
             message);
    CHECK(out.bytes() == wanted.bytes());

    const HostTensor residual = random_tensor(4, DType::kFloat16, {3, 2, 40});
    const HostTensor c_sum = x, c_residual = residual, added = x;
    CHECK(add_rmsnorm(added.view(), residual.view(), weight.view(), options).ok());
    check_ok(flashplan_add_rmsnorm(owner.add(c_sum.view()), owner.add(c_residual.view()), c_weight,
                                   0.25F, gemma ? 1 : 0, nullptr, message),
             message);
    CHECK(c_sum.bytes() == added.bytes());
    CHECK(c_residual.bytes() == residual.bytes());
    CHECK(c_sum.bytes() != x.bytes());
  }
  for (const bool has_bias : {false, true}) {
    CHECK(layernorm(x.view(), weight.view(), has_bias ? bias.view() : TensorView(), wanted.view(),
                    {0.5F})
              .ok());
    check_ok(flashplan_layernorm(c_x, c_weight, has_bias ? c_bias : nullptr, c_out, 0.5F, nullptr,
                                 message),
             message);
    CHECK(out.bytes() == wanted.bytes());
  }
  const auto refused = [&](flashplan_status status, const char* argument) {
    check_refused(as_status(status, message), kInvalid, argument);
  };
  refused(flashplan_rmsnorm(c_x, c_weight, c_out, -1.0F, 0, nullptr, message), "eps");
  refused(flashplan_layernorm(c_x, c_weight, nullptr, c_out, -1.0F, nullptr, message), "eps");
  refused(flashplan_layernorm(c_x, c_weight, c_x, c_out, 1.0F, nullptr, message), "bias");
  CHECK(flashplan_rmsnorm(nullptr, c_weight, c_out, 1.0F, 0, nullptr, message) != FLASHPLAN_OK);
  CHECK(flashplan_rmsnorm(c_x, c_weight, nullptr, 1.0F, 0, nullptr, message) != FLASHPLAN_OK);
  CHECK(flashplan_add_rmsnorm(c_x, nullptr, c_weight, 1, 0, nullptr, message) != FLASHPLAN_OK);
}

TEST(norms_of_other_weights) {
  const HostTensor x = random_tensor(1, DType::kBFloat16, {3, 40});
  const HostTensor wide = random_tensor(2, DType::kFloat32, {40});
  CTensors owner;
  const flashplan_tensor* c_x = owner.add(x.view());
  const HostTensor wanted(DType::kBFloat16, {3, 40}), out(DType::kBFloat16, {3, 40});
  const flashplan_tensor* c_out = owner.add(out.view());
  Message message;
  for (const bool has_weight : {false, true}) {
    const TensorView weight = has_weight ? wide.view() : TensorView();
    const flashplan_tensor* c_weight = has_weight ? owner.add(weight) : nullptr;
    CHECK(rmsnorm(x.view(), weight, wanted.view(), {0.25F, false}).ok());
    check_ok(flashplan_rmsnorm(c_x, c_weight, c_out, 0.25F, 0, nullptr, message), message);
    CHECK(out.bytes() == wanted.bytes());

    CHECK(layernorm(x.view(), weight, {}, wanted.view(), {0.25F}).ok());
    check_ok(flashplan_layernorm(c_x, c_weight, nullptr, c_out, 0.25F, nullptr, message), message);
    CHECK(out.bytes() == wanted.bytes());

    const HostTensor residual = random_tensor(4, DType::kBFloat16, {3, 40});
    const HostTensor c_sum = x, c_residual = residual, added = x;
    CHECK(add_rmsnorm(added.view(), residual.view(), weight, {0.25F, false}).ok());
    check_ok(flashplan_add_rmsnorm(owner.add(c_sum.view()), owner.add(c_residual.view()), c_weight,
                                   0.25F, 0, nullptr, message),
             message);
    CHECK(c_sum.bytes() == added.bytes());
    CHECK(c_residual.bytes() == residual.bytes());
  }
}

TEST(activations) {
  const HostTensor x = random_tensor(5, DType::kFloat32, {3, 80});
  CTensors owner;
  Message message;
  const HostTensor wanted(DType::kFloat8E4M3, {3, 40}), out(DType::kFloat8E4M3, {3, 40});
  const flashplan_tensor* c_x = owner.add(x.view());
  const flashplan_tensor* c_out = owner.add(out.view());
  for (const int32_t activation : {FLASHPLAN_SILU, FLASHPLAN_GELU, FLASHPLAN_GELU_TANH}) {
    CHECK(gated_activation(static_cast<Activation>(activation), x.view(), wanted.view(), 0.125F)
              .ok());
    check_ok(flashplan_gated_activation(activation, c_x, c_out, 0.125F, nullptr, message), message);
    CHECK(out.bytes() == wanted.bytes());
  }
  flashplan_status status = flashplan_gated_activation(3, c_x, c_out, 1.0F, nullptr, message);
  check_refused(as_status(status, message), kInvalid, "activation");
  status = flashplan_gated_activation(0, c_x, c_out, 0.0F, nullptr, message);
  check_refused(as_status(status, message), kInvalid, "scale");
}

TEST(gathers) {
  const HostTensor x = random_tensor(6, DType::kFloat16, {9, 5});
  const HostTensor indices(DType::kInt32, {3}), wanted(DType::kFloat16, {3, 5}),
      out(DType::kFloat16, {3, 5});
  auto* values = static_cast<int32_t*>(indices.view().data);
  values[0] = 8;
  values[1] = 0;
  values[2] = 8;
  CTensors owner;
  Message message;
  const flashplan_tensor* c_x = owner.add(x.view());
  const flashplan_tensor* c_indices = owner.add(indices.view());
  const flashplan_tensor* c_out = owner.add(out.view());
  CHECK(gather_rows(x.view(), indices.view(), wanted.view()).ok());
  check_ok(flashplan_gather_rows(c_x, c_indices, c_out, nullptr, message), message);
  CHECK(out.bytes() == wanted.bytes());
  values[1] = 9;
  const flashplan_status status = flashplan_gather_rows(c_x, c_indices, c_out, nullptr, message);
  check_refused(as_status(status, message), kInvalid, "indices[1]");
  CHECK(out.bytes() == wanted.bytes());
}

/// Each field differs from its default and from the others.
Rope some_rope(RopeScaling scaling) {
  Rope rope;
  rope.theta = 5000;
  rope.scale = 4;
  rope.rotary_dim = 12;
  rope.interleaved = true;
  rope.scaling = scaling;
  rope.original_length = 64;
  rope.low_freq_factor = 1.5;
  rope.high_freq_factor = 3;
  rope.beta_fast = 20;
  rope.beta_slow = 2;
  rope.truncate = false;
  rope.attention_factor = 1.25;
  return rope;
}

flashplan_rope c_rope(const Rope& rope) {
  auto c = started(flashplan_rope_init);
  c.theta = rope.theta;
  c.scale = rope.scale;
  c.rotary_dim = rope.rotary_dim;
  c.interleaved = rope.interleaved ? 1 : 0;
  c.scaling = static_cast<int32_t>(rope.scaling);
  c.original_length = rope.original_length;
  c.low_freq_factor = rope.low_freq_factor;
  c.high_freq_factor = rope.high_freq_factor;
  c.beta_fast = rope.beta_fast;
  c.beta_slow = rope.beta_slow;
  c.attention_factor = rope.attention_factor;
  c.truncate = rope.truncate ? 1 : 0;
  c.num_frequencies = rope.num_frequencies;
  if (c.num_frequencies > 0) c.frequencies = rope.frequencies.data();
  return c;
}

TEST(rotations) {
  const HostTensor q = random_tensor(6, DType::kFloat32, {3, 4, 16});
  const HostTensor k = random_tensor(7, DType::kFloat32, {3, 2, 16});
  const HostTensor positions = int_tensor({900, 30, 7});
  const HostTensor wanted_q = q, wanted_k = k, out_q = q, out_k = k;
  CTensors owner;
  Message message;
  const flashplan_tensor* c_q = owner.add(q.view());
  const flashplan_tensor* c_k = owner.add(k.view());
  const flashplan_tensor* c_positions = owner.add(positions.view());
  const flashplan_tensor* c_out_q = owner.add(out_q.view());
  const flashplan_tensor* c_out_k = owner.add(out_k.view());
  const auto run = [&](const flashplan_rope* rope) {
    return flashplan_apply_rope(c_q, c_k, c_positions, rope, c_out_q, c_out_k, nullptr, message);
  };
  std::vector<Rope> ropes;
  for (const RopeScaling scaling :
       {RopeScaling::kLinear, RopeScaling::kLlama3, RopeScaling::kYarn}) {
    ropes.push_back(some_rope(scaling));
  }
  ropes.push_back(some_rope(RopeScaling::kLinear));
  ropes.back().num_frequencies = 6;
  ropes.back().frequencies = {2.5, 0.5, 0.25, 0.125, 0.01, 0.0};
  for (const Rope& rope : ropes) {
    CHECK(apply_rope(q.view(), k.view(), positions.view(), rope, wanted_q.view(), wanted_k.view())
              .ok());
    const flashplan_rope c = c_rope(rope);
    check_ok(run(&c), message);
    CHECK(out_q.bytes() == wanted_q.bytes());
    CHECK(out_k.bytes() == wanted_k.bytes());
    CHECK(out_q.bytes() != q.bytes());
  }
  auto defaults = started(flashplan_rope_init);
  const flashplan_rope expected = c_rope(Rope());
  CHECK(std::memcmp(&defaults, &expected, sizeof(expected)) == 0);

  const auto refused = [&](const flashplan_rope* rope, const char* argument) {
    check_refused(as_status(run(rope), message), kInvalid, argument);
  };
  refused(nullptr, "rope");
  flashplan_rope wrong = defaults;
  wrong.scaling = 3;
  refused(&wrong, "rope.scaling");
  wrong = defaults;
  wrong.reserved = 1;
  refused(&wrong, "rope.reserved");
  const double frequency = 1.0;
  wrong = defaults;
  wrong.frequencies = &frequency;
  for (const int32_t count : {-1, 1, 257, INT32_MAX}) {  // none is read beyond the pointer's one
    wrong.num_frequencies = count;
    refused(&wrong, count == 1 ? "rope.frequencies" : "rope.num_frequencies");
  }
  wrong.frequencies = nullptr;
  wrong.num_frequencies = 8;
  refused(&wrong, "rope.frequencies");
  wrong = defaults;
  wrong.struct_size = 80;
  refused(&wrong, "rope.struct_size");
}

TEST(rotations_by_a_table) {
  const HostTensor q = random_tensor(6, DType::kFloat32, {3, 4, 16});
  const HostTensor k = random_tensor(7, DType::kFloat32, {3, 2, 16});
  const HostTensor table = random_tensor(8, DType::kFloat32, {31, 12});
  const HostTensor positions = int_tensor({9, 30, 7});
  const HostTensor wanted_q = q, wanted_k = k, out_q = q, out_k = k;
  CTensors owner;
  Message message;
  const flashplan_tensor* c_q = owner.add(q.view());
  const flashplan_tensor* c_k = owner.add(k.view());
  const flashplan_tensor* c_positions = owner.add(positions.view());
  const flashplan_tensor* c_out_q = owner.add(out_q.view());
  const flashplan_tensor* c_out_k = owner.add(out_k.view());
  const auto run = [&](const flashplan_tensor* cosines, int32_t interleaved) {
    return flashplan_apply_rope_table(c_q, c_k, c_positions, cosines, interleaved, c_out_q, c_out_k,
                                      nullptr, message);
  };
  for (const bool interleaved : {false, true}) {
    CHECK(apply_rope(q.view(), k.view(), positions.view(), table.view(), interleaved,
                     wanted_q.view(), wanted_k.view())
              .ok());
    check_ok(run(owner.add(table.view()), interleaved ? 1 : 0), message);
    CHECK(out_q.bytes() == wanted_q.bytes());
    CHECK(out_k.bytes() == wanted_k.bytes());
    CHECK(out_q.bytes() != q.bytes());
  }
  check_refused(as_status(run(nullptr, 0), message), kInvalid, "cos_sin_cache");
}

/// Two requests over pages of 4, and their new queries and keys.
struct Cache {
  HostTensor q = random_tensor(8, DType::kFloat32, {3, 4, 16});
  HostTensor k = random_tensor(9, DType::kFloat32, {3, 2, 16});
  HostTensor v = random_tensor(10, DType::kFloat32, {3, 2, 16});
  HostTensor k_cache{DType::kFloat8E5M2, {5, 4, 2, 16}};
  HostTensor v_cache{DType::kFloat8E5M2, {5, 4, 2, 16}};
  HostTensor out_q{DType::kFloat32, {3, 4, 16}};
  HostTensor indptr = int_tensor({0, 1, 3});
  HostTensor kv_lens = int_tensor({5, 7});
  HostTensor page_indptr = int_tensor({0, 2, 4});
  HostTensor page_indices = int_tensor({4, 1, 0, 3});

  AppendTensors tensors() const {
    AppendTensors t;
    t.k = k.view();
    t.v = v.view();
    t.k_cache = k_cache.view();
    t.v_cache = v_cache.view();
    t.indptr = indptr.view();
    t.kv_lens = kv_lens.view();
    t.page_indptr = page_indptr.view();
    t.page_indices = page_indices.view();
    t.k_scale = 0.5F;
    t.v_scale = 2.0F;
    return t;
  }
};

TEST(rotations_while_appending) {
  const Cache expected, cache;
  const Rope rope = some_rope(RopeScaling::kYarn);
  CHECK(rope_append_paged_kv(expected.q.view(), expected.tensors(), rope, expected.out_q.view())
            .ok());

  CTensors owner;
  Message message;
  flashplan_append_tensors c = c_append(cache.tensors(), owner);
  const flashplan_tensor* q = owner.add(cache.q.view());
  const flashplan_tensor* out_q = owner.add(cache.out_q.view());
  const flashplan_rope c_turns = c_rope(rope);
  const auto run = [&](const flashplan_append_tensors* tensors, const flashplan_rope* turns) {
    return flashplan_rope_append_paged_kv(q, tensors, turns, out_q, nullptr, message);
  };
  check_ok(run(&c, &c_turns), message);
  CHECK(cache.k_cache.bytes() == expected.k_cache.bytes());
  CHECK(cache.v_cache.bytes() == expected.v_cache.bytes());
  CHECK(cache.out_q.bytes() == expected.out_q.bytes());
  CHECK(cache.k_cache.bytes() != Cache().k_cache.bytes());

  check_refused(as_status(run(nullptr, &c_turns), message), kInvalid, "tensors");
  check_refused(as_status(run(&c, nullptr), message), kInvalid, "rope");
  c.slot_mapping = c.indptr;
  check_refused(as_status(run(&c, &c_turns), message), kInvalid, "slot_mapping");
}

TEST(softmaxes) {
  const HostTensor logits = random_tensor(11, DType::kBFloat16, {2, 30});
  const HostTensor temperatures = float_tensor({0.5, 2});
  const HostTensor wanted(DType::kFloat32, {2, 30}), out(DType::kFloat32, {2, 30});
  CTensors owner;
  Message message;
  const flashplan_tensor* c_logits = owner.add(logits.view());
  const flashplan_tensor* c_temperatures = owner.add(temperatures.view());
  const flashplan_tensor* c_out = owner.add(out.view());
  CHECK(softmax(logits.view(), 0.7F, TensorView(), wanted.view()).ok());
  check_ok(flashplan_softmax(c_logits, 0.7F, nullptr, c_out, nullptr, message), message);
  CHECK(out.bytes() == wanted.bytes());
  CHECK(softmax(logits.view(), 0.7F, temperatures.view(), wanted.view()).ok());
  check_ok(flashplan_softmax(c_logits, 0.7F, c_temperatures, c_out, nullptr, message), message);
  CHECK(out.bytes() == wanted.bytes());
  const flashplan_status status =
      flashplan_softmax(c_logits, 0.0F, nullptr, c_out, nullptr, message);
  check_refused(as_status(status, message), kInvalid, "temperature");
}

}  // namespace
}  // namespace flashplan::test
