// SPDX-License-Identifier: Apache-2.0
// The operators of the C interface do what those of the C++ one do, and refuse what it refuses.
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "c_structs.h"
#include "check.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c_ops.h"
#include "host_tensor.h"
#include "refusal.h"

namespace flashplan::test {
namespace {

const auto kInvalid = StatusCode::kInvalidArgument;

HostTensor random_tensor(uint64_t seed, DType dtype, std::vector<int64_t> shape) {
  Random random(seed);
  HostTensor tensor(dtype, std::move(shape));
  const TensorView view = tensor.view();
  const auto dim = [&](int d) { return d < view.rank ? view.shape[d] : 1; };
  for (int64_t a = 0; a < dim(0); ++a) {
    for (int64_t b = 0; b < dim(1); ++b) {
      for (int64_t c = 0; c < dim(2); ++c) tensor.set({a, b, c}, random_element(random));
    }
  }
  return tensor;
}

HostTensor float_tensor(const std::vector<double>& values) {
  HostTensor tensor(DType::kFloat32, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) tensor.set({static_cast<int64_t>(i)}, values[i]);
  return tensor;
}

/// A tensor over memory of 64-bit integers.
TensorView wide_ints(std::vector<int64_t>& values) {
  return contiguous(values.data(), DType::kInt64, Device(), {static_cast<int64_t>(values.size())});
}

/// Structs that are full of what must be overwritten before their init functions see them.
template <typename T>
T started(void (*init)(T*, size_t)) {
  T t;
  std::memset(&t, 0xff, sizeof(t));
  init(&t, sizeof(t));
  return t;
}

void check_ok(flashplan_status status, const Message& message) {
  CHECK_EQ(std::string(message.text), "");
  CHECK_EQ(status, FLASHPLAN_OK);
}

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
                    0.5F)
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
  CHECK(flashplan_rmsnorm(c_x, nullptr, c_out, 1.0F, 0, nullptr, message) != FLASHPLAN_OK);
  CHECK(flashplan_rmsnorm(c_x, c_weight, nullptr, 1.0F, 0, nullptr, message) != FLASHPLAN_OK);
  CHECK(flashplan_add_rmsnorm(c_x, nullptr, c_weight, 1, 0, nullptr, message) != FLASHPLAN_OK);
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
  for (const RopeScaling scaling :
       {RopeScaling::kLinear, RopeScaling::kLlama3, RopeScaling::kYarn}) {
    const Rope rope = some_rope(scaling);
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
  wrong = defaults;
  wrong.struct_size = 80;
  refused(&wrong, "rope.struct_size");
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
};

TEST(rotations_while_appending) {
  const Cache expected, cache;
  const Rope rope = some_rope(RopeScaling::kYarn);
  AppendTensors t;
  t.k = expected.k.view();
  t.v = expected.v.view();
  t.k_cache = expected.k_cache.view();
  t.v_cache = expected.v_cache.view();
  t.indptr = expected.indptr.view();
  t.kv_lens = expected.kv_lens.view();
  t.page_indptr = expected.page_indptr.view();
  t.page_indices = expected.page_indices.view();
  t.k_scale = 0.5F;
  t.v_scale = 2.0F;
  CHECK(rope_append_paged_kv(expected.q.view(), t, rope, expected.out_q.view()).ok());

  CTensors owner;
  Message message;
  auto c = started(flashplan_append_tensors_init);
  c.k = owner.add(cache.k.view());
  c.v = owner.add(cache.v.view());
  c.k_cache = owner.add(cache.k_cache.view());
  c.v_cache = owner.add(cache.v_cache.view());
  c.indptr = owner.add(cache.indptr.view());
  c.kv_lens = owner.add(cache.kv_lens.view());
  c.page_indptr = owner.add(cache.page_indptr.view());
  c.page_indices = owner.add(cache.page_indices.view());
  c.k_scale = 0.5F;
  c.v_scale = 2.0F;
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

TEST(penalties) {
  const HostTensor before = random_tensor(12, DType::kFloat32, {2, 9});
  HostTensor history(DType::kInt32, {2, 3});
  constexpr uint32_t kTokens[] = {1, 8, 1, 0, 2, 2};
  for (int64_t i = 0; i < 6; ++i) history.set_bits({i / 3, i % 3}, kTokens[i]);
  const HostTensor lens = int_tensor({3, 2});
  const HostTensor each[] = {float_tensor({1.5, 3}), float_tensor({0.5, 2}),
                             float_tensor({0.75, 1})};
  Message message;
  for (const bool has_tensors : {false, true}) {
    PenaltyOptions options;
    options.repetition = 1.25F;
    options.presence = 0.375F;
    options.frequency = 0.625F;
    CTensors owner;
    auto c = started(flashplan_penalty_tensors_init);
    if (has_tensors) {
      c.repetitions = owner.add(options.repetitions = each[0].view());
      c.presences = owner.add(options.presences = each[1].view());
      c.frequencies = owner.add(options.frequencies = each[2].view());
    }
    const HostTensor wanted = before, logits = before;
    CHECK(apply_penalties(wanted.view(), history.view(), lens.view(), options).ok());
    c.logits = owner.add(logits.view());
    c.history = owner.add(history.view());
    c.history_lens = owner.add(lens.view());
    check_ok(flashplan_apply_penalties(&c, nullptr, message), message);  // the defaults
    if (!has_tensors) CHECK(logits.bytes() == before.bytes());
    c.repetition = options.repetition;
    c.presence = options.presence;
    c.frequency = options.frequency;
    if (!has_tensors) check_ok(flashplan_apply_penalties(&c, nullptr, message), message);
    CHECK(logits.bytes() == wanted.bytes());

    c.reserved = 1;
    flashplan_status status = flashplan_apply_penalties(&c, nullptr, message);
    check_refused(as_status(status, message), kInvalid, "tensors.reserved");
    status = flashplan_apply_penalties(nullptr, nullptr, message);
    check_refused(as_status(status, message), kInvalid, "tensors");
  }
}

/// Logits and outputs of a call, for whichever interface.
struct Drawing {
  HostTensor logits = random_tensor(13, DType::kFloat32, {3, 50});
  HostTensor ids{DType::kInt32, {3}};
  HostTensor logprobs{DType::kFloat32, {3}};
  HostTensor status{DType::kInt32, {3}};

  bool operator==(const Drawing& other) const {
    return ids.bytes() == other.ids.bytes() && logprobs.bytes() == other.logprobs.bytes() &&
           status.bytes() == other.status.bytes();
  }
};

flashplan_sample_tensors c_sample(const Drawing& drawing, const SampleOptions& o, CTensors& owner) {
  auto c = started(flashplan_sample_tensors_init);
  c.logits = owner.add(drawing.logits.view());
  c.out = owner.add(drawing.ids.view());
  c.logprobs = owner.add(drawing.logprobs.view());
  c.status = owner.add(drawing.status.view());
  c.temperatures = owner.add(o.temperatures);
  c.top_ks = owner.add(o.top_ks);
  c.top_ps = owner.add(o.top_ps);
  c.min_ps = owner.add(o.min_ps);
  c.seeds = owner.add(o.seeds);
  c.offsets = owner.add(o.offsets);
  c.logit_bias = owner.add(o.logit_bias);
  c.temperature = o.temperature;
  c.top_k = o.top_k;
  c.top_p = o.top_p;
  c.min_p = o.min_p;
  c.seed = o.seed;
  c.offset = o.offset;
  c.from_probs = o.from_probs ? 1 : 0;
  return c;
}

TEST(samples) {
  const HostTensor temperatures = float_tensor({0.5, 0, 2}), top_ps = float_tensor({0.5, 1, 0.75});
  const HostTensor min_ps = float_tensor({0, 0.25, 0.125}),
                   bias = random_tensor(14, DType::kFloat32, {50});
  const HostTensor top_ks = int_tensor({20, 3, 9});
  std::vector<int64_t> seeds{1, int64_t{1} << 40, -5}, offsets{9, 8, int64_t{7} << 33};
  HostTensor probs(DType::kFloat32, {3, 50});
  for (int64_t i = 0; i < 150; ++i) probs.set({i / 50, i % 50}, i % 50 < 32 ? 0.03125 : 0.0);
  using Change = std::function<void(SampleOptions&)>;
  const std::vector<Change> all = {
      [](auto&) {},
      [](auto& o) { o.temperature = 0.3F; },
      [](auto& o) { o.top_k = 2; },
      [](auto& o) { o.top_p = 0.2F; },
      [](auto& o) { o.min_p = 0.6F; },
      [](auto& o) { o.seed = int64_t{77} << 32; },
      [](auto& o) { o.offset = int64_t{78} << 32; },
      [](auto& o) { o.from_probs = true; },
      [&](auto& o) { o.temperatures = temperatures.view(); },
      [&](auto& o) { o.top_ks = top_ks.view(); },
      [&](auto& o) { o.top_ps = top_ps.view(); },
      [&](auto& o) { o.min_ps = min_ps.view(); },
      [&](auto& o) { o.seeds = wide_ints(seeds); },
      [&](auto& o) { o.offsets = wide_ints(offsets); },
      [&](auto& o) { o.logit_bias = bias.view(); },
  };
  Message message;
  for (const Change& change : all) {
    SampleOptions options;
    change(options);
    for (int64_t draw = 0; draw < 8; ++draw) {  // so that a parameter that is lost is seen
      Drawing expected, drawing;
      if (options.from_probs) expected.logits = drawing.logits = probs;
      options.seed += 1;
      CHECK(sample(expected.logits.view(), options,
                   {expected.ids.view(), expected.logprobs.view(), expected.status.view()})
                .ok());
      CTensors owner;
      const flashplan_sample_tensors c = c_sample(drawing, options, owner);
      check_ok(flashplan_sample(&c, nullptr, message), message);
      CHECK(drawing == expected);
    }
  }

  Drawing drawing;
  CTensors owner;
  auto defaults = started(flashplan_sample_tensors_init);
  const flashplan_sample_tensors good = c_sample(drawing, SampleOptions(), owner);
  defaults.logits = good.logits;
  defaults.out = good.out;
  defaults.logprobs = good.logprobs;
  defaults.status = good.status;
  CHECK(std::memcmp(&defaults, &good, sizeof(good)) == 0);
  const auto refused = [&](const char* argument,
                           const std::function<void(flashplan_sample_tensors&)>& change) {
    flashplan_sample_tensors wrong = good;
    change(wrong);
    check_refused(as_status(flashplan_sample(&wrong, nullptr, message), message), kInvalid,
                  argument);
  };
  refused("tensors.reserved", [](auto& t) { t.reserved = 1; });
  refused("tensors.struct_size", [](auto& t) { t.struct_size -= 8; });
  refused("logits.rank", [&](auto& t) {
    auto* broken = const_cast<flashplan_tensor*>(owner.add(drawing.logits.view()));
    broken->rank = 0;
    t.logits = broken;
  });
  refused("temperature", [](auto& t) { t.temperature = -1.0F; });
  refused("top_k", [](auto& t) { t.top_k = 0; });
  refused("top_p", [](auto& t) { t.top_p = 0.0F; });
  refused("min_p", [](auto& t) { t.min_p = 2.0F; });
  refused("logits[0]", [](auto& t) { t.from_probs = 1; });
  CHECK_EQ(flashplan_sample(nullptr, nullptr, message), FLASHPLAN_INVALID_ARGUMENT);
  for (const bool is_input : {false, true}) {
    flashplan_sample_tensors missing = good;
    (is_input ? missing.logits : missing.out) = nullptr;
    CHECK(flashplan_sample(&missing, nullptr, message) != FLASHPLAN_OK);
    const std::string start = is_input ? "logits: expected " : "out: expected ";
    CHECK_EQ(std::string(message).rfind(start, 0), 0U);
  }
}

/// Two requests with trees of three drafts over a vocabulary of 6.
struct Verification {
  HostTensor tokens{DType::kInt32, {2, 3}};
  HostTensor draft_probs{DType::kFloat32, {2, 3, 6}};
  HostTensor target_probs{DType::kFloat32, {2, 4, 6}};
  HostTensor parents = int_tensor({-1, -1, 1});
  HostTensor out{DType::kInt32, {2, 4}};
  HostTensor num_accepted{DType::kInt32, {2}};
  HostTensor nodes{DType::kInt32, {2, 3}};
  HostTensor status{DType::kInt32, {2}};

  Verification() {
    Random random(15);
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t i = 0; i < 4; ++i) {
        if (i < 3) tokens.set_bits({r, i}, static_cast<uint32_t>(random.between(0, 5)));
        for (int64_t x = 0; x < 6; ++x) {
          if (i < 3) draft_probs.set({r, i, x}, x < 4 ? 0.125 : 0.25);
          target_probs.set({r, i, x}, x < 4 ? 0.1875 : 0.125);
        }
      }
    }
  }
  bool operator==(const Verification& other) const {
    return out.bytes() == other.out.bytes() && num_accepted.bytes() == other.num_accepted.bytes() &&
           nodes.bytes() == other.nodes.bytes() && status.bytes() == other.status.bytes();
  }
};

TEST(verifications) {
  std::vector<int64_t> seeds{3, int64_t{5} << 40}, offsets{-4, int64_t{6} << 40};
  Message message;
  for (int64_t round = 0; round < 40; ++round) {
    const Verification expected, verification;
    VerifyOptions options;
    options.seed = round << 33;
    options.offset = 100 - (round << 34);
    if (round % 4 == 1) options.seeds = wide_ints(seeds);
    if (round % 4 == 2) options.offsets = wide_ints(offsets);
    Drafts drafts{expected.tokens.view(), expected.draft_probs.view(), expected.target_probs.view(),
                  expected.parents.view()};
    if (round % 4 == 3) drafts.parents = TensorView();
    CHECK(speculative_verify(drafts, options,
                             {expected.out.view(), expected.num_accepted.view(),
                              expected.nodes.view(), expected.status.view()})
              .ok());
    CTensors owner;
    auto c = started(flashplan_verify_tensors_init);
    c.draft_tokens = owner.add(verification.tokens.view());
    c.draft_probs = owner.add(verification.draft_probs.view());
    c.target_probs = owner.add(verification.target_probs.view());
    if (round % 4 != 3) c.draft_parents = owner.add(verification.parents.view());
    c.seeds = owner.add(options.seeds);
    c.offsets = owner.add(options.offsets);
    c.out = owner.add(verification.out.view());
    c.num_accepted = owner.add(verification.num_accepted.view());
    c.nodes = owner.add(verification.nodes.view());
    c.status = owner.add(verification.status.view());
    c.seed = options.seed;
    c.offset = options.offset;
    check_ok(flashplan_speculative_verify(&c, nullptr, message), message);
    CHECK(verification == expected);

    c.struct_size = 16;
    flashplan_status status = flashplan_speculative_verify(&c, nullptr, message);
    check_refused(as_status(status, message), kInvalid, "tensors.struct_size");
    c.struct_size = sizeof(c);
    c.target_probs = c.draft_probs;
    status = flashplan_speculative_verify(&c, nullptr, message);
    CHECK_EQ(status, FLASHPLAN_INVALID_ARGUMENT);
  }
}

}  // namespace
}  // namespace flashplan::test
