// SPDX-License-Identifier: Apache-2.0
// Penalties, sampling and verification of the C interface do what those of the C++ one do, and
// refuse what it refuses.
#include <cstring>
#include <functional>
#include <string>
#include <vector>

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

/// A tensor over memory of 64-bit integers.
TensorView wide_ints(std::vector<int64_t>& values) {
  return contiguous(values.data(), DType::kInt64, Device(), {static_cast<int64_t>(values.size())});
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
  HostTensor top_ids{DType::kInt32, {3, 4}};
  HostTensor top_logprobs{DType::kFloat32, {3, 4}};

  SampleOutputs outputs(LogprobsOf of) const {
    return {ids.view(), logprobs.view(), status.view(), of, top_ids.view(), top_logprobs.view()};
  }
  bool operator==(const Drawing& other) const {
    return ids.bytes() == other.ids.bytes() && logprobs.bytes() == other.logprobs.bytes() &&
           status.bytes() == other.status.bytes() && top_ids.bytes() == other.top_ids.bytes() &&
           top_logprobs.bytes() == other.top_logprobs.bytes();
  }
};

flashplan_sample_tensors c_sample(const Drawing& drawing, const SampleOptions& o, CTensors& owner) {
  auto c = started(flashplan_sample_tensors_init);
  c.logits = owner.add(drawing.logits.view());
  c.out = owner.add(drawing.ids.view());
  c.logprobs = owner.add(drawing.logprobs.view());
  c.status = owner.add(drawing.status.view());
  c.top_ids = owner.add(drawing.top_ids.view());
  c.top_logprobs = owner.add(drawing.top_logprobs.view());
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
  c.joint = o.joint ? 1 : 0;
  c.rows = owner.add(o.rows);
  return c;
}

TEST(samples) {
  const HostTensor temperatures = float_tensor({0.5, 0, 2}), top_ps = float_tensor({0.5, 1, 0.75});
  const HostTensor min_ps = float_tensor({0, 0.25, 0.125}),
                   bias = random_tensor(14, DType::kFloat32, {50});
  const HostTensor top_ks = int_tensor({20, 3, 9}), rows = int_tensor({2, 2, 0});
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
      [](auto& o) { o.top_k = 9, o.top_p = 0.7F, o.joint = true; },
      [&](auto& o) { o.rows = rows.view(); },
  };
  Message message;
  for (const Change& change : all) {
    SampleOptions options;
    change(options);
    for (int64_t draw = 0; draw < 8; ++draw) {  // so that a parameter that is lost is seen
      Drawing expected, drawing;
      if (options.from_probs) expected.logits = drawing.logits = probs;
      options.seed += 1;
      const LogprobsOf of = draw % 2 == 0 ? LogprobsOf::kFiltered : LogprobsOf::kRaw;
      CHECK(sample(expected.logits.view(), options, expected.outputs(of)).ok());
      CTensors owner;
      flashplan_sample_tensors c = c_sample(drawing, options, owner);
      c.raw_logprobs = draw % 2 == 0 ? 0 : 1;
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
  defaults.top_ids = good.top_ids;
  defaults.top_logprobs = good.top_logprobs;
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

TEST(filters) {
  const HostTensor logits = random_tensor(15, DType::kFloat32, {3, 50});
  const HostTensor wanted(DType::kFloat32, {3, 50}), out(DType::kFloat32, {3, 50});
  const HostTensor top_ks = int_tensor({20, 3, 9}), status(DType::kInt32, {3});
  SampleOptions options;
  options.top_ks = top_ks.view();
  options.top_p = 0.75F;
  options.joint = true;
  CHECK(filtered_probs(logits.view(), options, wanted.view()).ok());
  Message message;
  CTensors owner;
  auto c = started(flashplan_sample_tensors_init);
  c.logits = owner.add(logits.view());
  c.out = owner.add(out.view());
  c.status = owner.add(status.view());
  c.top_ks = owner.add(top_ks.view());
  c.top_p = 0.75F;
  c.joint = 1;
  check_ok(flashplan_filtered_probs(&c, nullptr, message), message);
  CHECK(out.bytes() == wanted.bytes());
  const auto refused = [&](const char* argument, const flashplan_sample_tensors& wrong) {
    check_refused(as_status(flashplan_filtered_probs(&wrong, nullptr, message), message), kInvalid,
                  argument);
  };
  for (const auto& [name, member] :
       {std::pair("logprobs", &flashplan_sample_tensors::logprobs),
        std::pair("top_ids", &flashplan_sample_tensors::top_ids),
        std::pair("top_logprobs", &flashplan_sample_tensors::top_logprobs),
        std::pair("rows", &flashplan_sample_tensors::rows)}) {
    flashplan_sample_tensors wrong = c;
    wrong.*member = c.status;
    refused(name, wrong);
  }
  flashplan_sample_tensors wrong = c;
  wrong.top_p = 2.0F;
  refused("top_p", wrong);

  CHECK(top_k_mask(logits.view(), 7, TensorView(), wanted.view()).ok());
  check_ok(flashplan_top_k_mask(c.logits, 7, nullptr, c.out, nullptr, message), message);
  CHECK(out.bytes() == wanted.bytes());
  CHECK(top_k_mask(logits.view(), 7, top_ks.view(), wanted.view()).ok());
  check_ok(flashplan_top_k_mask(c.logits, 7, c.top_ks, c.out, nullptr, message), message);
  CHECK(out.bytes() == wanted.bytes());
  check_refused(
      as_status(flashplan_top_k_mask(c.logits, 0, nullptr, c.out, nullptr, message), message),
      kInvalid, "top_k");
  check_refused(
      as_status(flashplan_top_k_mask(nullptr, 1, nullptr, c.out, nullptr, message), message),
      kInvalid, "logits");
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
    if (round % 3 == 1) drafts.draft_probs = TensorView();
    CHECK(speculative_verify(drafts, options,
                             {expected.out.view(), expected.num_accepted.view(),
                              expected.nodes.view(), expected.status.view()})
              .ok());
    CTensors owner;
    auto c = started(flashplan_verify_tensors_init);
    c.draft_tokens = owner.add(verification.tokens.view());
    if (round % 3 != 1) c.draft_probs = owner.add(verification.draft_probs.view());
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
    c.target_probs = c.draft_tokens;
    status = flashplan_speculative_verify(&c, nullptr, message);
    CHECK_EQ(status, FLASHPLAN_INVALID_TYPE);
  }
}

}  // namespace
}  // namespace flashplan::test
