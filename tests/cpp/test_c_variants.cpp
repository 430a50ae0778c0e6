// SPDX-License-Identifier: Apache-2.0
// Variants and rotations in attention of the C interface.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "c_structs.h"
#include "check.h"
#include "flashplan/flashplan_c_ops.h"
#include "problem.h"
#include "refusal.h"
#include "small_options.h"
#include "variant_compiler.h"

namespace flashplan::test {
namespace {

struct DestroyVariant {
  void operator()(flashplan_variant* variant) const { flashplan_variant_destroy(variant); }
};
using CVariant = std::unique_ptr<flashplan_variant, DestroyVariant>;

Status make(const flashplan_variant_description& description, CVariant* to) {
  flashplan_variant* variant = nullptr;
  Message message;
  const flashplan_status status = flashplan_variant_create(&description, &variant, message);
  to->reset(variant);
  return as_status(status, message);
}

const flashplan_variant_tensor kTensors[] = {{"shifts", FLASHPLAN_FLOAT32, 0}};
const flashplan_variant_scalar kScalars[] = {{"gain", 1.0F, 0}};

flashplan_variant_description shifted() {
  auto d = started(flashplan_variant_description_init);
  d.name = "shifted";
  d.value = "return gain * x + shifts[head];";
  d.mask = "return key < 2;";
  d.tensors = kTensors;
  d.scalars = kScalars;
  d.num_tensors = d.num_scalars = 1;
  return d;
}

TEST(descriptions_that_are_refused) {
  const auto refuses = [](const char* argument, auto change) {
    flashplan_variant_description d = shifted();
    change(d);
    CVariant variant;
    const Status status = make(d, &variant);
    CHECK(!status.ok());
    check_refused(status, status.code, argument);
    CHECK(variant == nullptr);
  };
  CHECK_EQ(shifted().softmax, 1);
  refuses("description.struct_size", [](auto& d) { d.struct_size = 8; });
  refuses("description.reserved", [](auto& d) { d.reserved = 1; });
  refuses("name", [](auto& d) { d.name = nullptr; });
  refuses("value", [](auto& d) { d.value = "#"; });
  refuses("query, key, value, output, logits, mask", [](auto& d) { d.value = d.mask = nullptr; });
  refuses("tensors", [](auto& d) { d.tensors = nullptr; });
  refuses("tensors", [](auto& d) { d.num_tensors = 9; });
  refuses("tensors", [](auto& d) { d.num_tensors = -1; });
  refuses("scalars", [](auto& d) { d.scalars = nullptr; });
  refuses("scalars", [](auto& d) { d.num_scalars = 9; });
  static const flashplan_variant_tensor kHalf[] = {{"halves", FLASHPLAN_FLOAT16, 0}};
  refuses("tensors", [](auto& d) { d.tensors = kHalf; });
  static const flashplan_variant_tensor kReserved[] = {{"shifts", FLASHPLAN_FLOAT32, 1}};
  refuses("tensors.reserved", [](auto& d) { d.tensors = kReserved; });
  static const flashplan_variant_scalar kNameless[] = {{nullptr, 1.0F, 0}};
  refuses("scalars", [](auto& d) { d.scalars = kNameless; });
  Message message;
  flashplan_variant* variant = nullptr;
  check_refused(as_status(flashplan_variant_create(nullptr, &variant, message), message),
                StatusCode::kInvalidArgument, "description");
  const flashplan_variant_description d = shifted();
  check_refused(as_status(flashplan_variant_create(&d, nullptr, message), message),
                StatusCode::kInvalidArgument, "variant");
  flashplan_variant_destroy(nullptr);
}

TEST(a_plan_with_a_variant) {
  flashplan_options options = c_options(small_options());
  CVariant variant;
  CHECK(make(shifted(), &variant).ok());
  options.variant = variant.get();
  const CPlan plan = create(options);
  variant.reset();  // the plan has what it needs
  CHECK(std::string(flashplan_plan_kernel_name(plan.get())).ends_with("_shifted"));

  Problem p;
  p.options = small_options();
  p.batch.add(1, 3);
  Random random(1);
  fill_problem(random, p);
  Workspace workspace(flashplan_plan_workspace_bytes(plan.get()));
  for (int64_t key = 0; key < 3; ++key) {
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t d = 0; d < 8; ++d) p.v.set(kv_index(p, 0, key, head, d), key < 2 ? 2.0 : 1000.0);
    }
  }
  float shifts[] = {0.5F, 1.5F};
  Outputs out(p);
  CTensors owner;
  AttentionTensors views = tensors_of(p, out, workspace);
  const flashplan_tensor* tensors[] = {
      owner.add(contiguous(shifts, DType::kFloat32, Device(), {2}))};
  flashplan_attention_tensors t = c_tensors(views, owner);
  t.variant_tensors = tensors;
  t.num_variant_tensors = 1;
  flashplan_batch batch = c_batch(p.batch_view());
  Message message;
  const auto run = [&] { return flashplan_plan_run(plan.get(), &t, nullptr, message); };
  const auto values_are = [&](float gain) {
    CHECK_EQ(run(), FLASHPLAN_OK);
    CHECK_EQ(std::string(message), "");
    for (int64_t head = 0; head < 4; ++head) {
      CHECK(std::abs(out.o.get({0, head, 7}) - (gain * 2.0 + (head < 2 ? 0.5 : 1.5))) < 1e-5);
    }
  };
  CHECK_EQ(flashplan_plan_plan(plan.get(), &batch, nullptr, message), FLASHPLAN_OK);
  values_are(1.0F);
  const float gain = 3.0F;
  t.variant_scalars = &gain;
  t.num_variant_scalars = 1;
  values_are(3.0F);
  const int32_t ranges[] = {0, 2};
  batch.key_ranges = ranges;
  CHECK_EQ(flashplan_plan_plan(plan.get(), &batch, nullptr, message), FLASHPLAN_OK);
  values_are(3.0F);

  const auto refused = [&](const char* argument) {
    const Status status = as_status(run(), message);
    check_refused(status, status.code, argument);
    CHECK(!status.ok());
  };
  for (const int32_t count : {-1, 0, 9}) {
    t.num_variant_tensors = count;
    refused("variant_tensors");
  }
  t.num_variant_tensors = 1;
  t.num_variant_scalars = 0;
  refused("variant_scalars");
  t.num_variant_scalars = 1;
  t.variant_tensors = nullptr;
  refused("variant_tensors");
  const flashplan_tensor* none[] = {nullptr};
  t.variant_tensors = none;
  refused("shifts");
  const flashplan_tensor nothing = {};
  none[0] = &nothing;
  refused("variant_tensors[0].struct_size");
  flashplan_tensor wrong = *tensors[0];
  none[0] = &wrong;
  for (const int32_t rank : {INT32_MIN, -1, 5, 1000, INT32_MAX}) {
    wrong.rank = rank;
    refused("shifts");
  }
}

TEST(a_variant_that_does_not_compile) {
  flashplan_variant_description d = shifted();
  d.value = "return nonsense;";
  CVariant variant;
  CHECK(make(d, &variant).ok());
  char log[4096] = "";
  CHECK_EQ(flashplan_variant_compile_log(variant.get(), log, sizeof(log)), 0U);
  flashplan_options options = c_options(small_options());
  options.variant = variant.get();
  flashplan_plan* plan = nullptr;
  Message message;
  const flashplan_status status = flashplan_plan_create(&options, &plan, message);
  check_refused(as_status(status, message), StatusCode::kInvalidArgument, "variant");
  CHECK(plan == nullptr);
  const size_t length = flashplan_variant_compile_log(variant.get(), log, sizeof(log));
  CHECK(length > 0);
  CHECK(std::string(log).find("nonsense") != std::string::npos);
  CHECK_EQ(flashplan_variant_compile_log(variant.get(), nullptr, 0), length);
  CHECK_EQ(flashplan_variant_compile_log(nullptr, log, sizeof(log)), 0U);
  CHECK_EQ(std::string(log), "");
}

TEST(a_plan_with_a_rotation) {
  Problem p;
  p.options = small_options();
  p.batch.add(3, 9);
  p.batch.add(1, 30);
  Random random(2);
  fill_problem(random, p);
  auto rope = started(flashplan_rope_init);
  rope.theta = 500.0;
  rope.rotary_dim = 4;
  rope.interleaved = 1;
  flashplan_options options = c_options(p.options);
  options.rope = &rope;
  const CPlan plan = create(options);
  const flashplan_batch batch = c_batch(p.batch_view());
  CHECK_EQ(flashplan_plan_plan(plan.get(), &batch, nullptr, nullptr), FLASHPLAN_OK);
  Workspace workspace(flashplan_plan_workspace_bytes(plan.get()));
  Outputs out(p), expected(p), unrotated(p);
  CTensors owner;
  const flashplan_attention_tensors t = c_tensors(tensors_of(p, out, workspace), owner);
  CHECK_EQ(flashplan_plan_run(plan.get(), &t, nullptr, nullptr), FLASHPLAN_OK);
  CHECK_EQ(run_problem(p, unrotated), "");
  p.options.rope.emplace();
  p.options.rope->theta = 500.0;
  p.options.rope->rotary_dim = 4;
  p.options.rope->interleaved = true;
  CHECK_EQ(run_problem(p, expected), "");
  CHECK(out == expected);
  CHECK(!(out == unrotated));

  flashplan_plan* other = nullptr;
  Message message;
  for (const auto& [argument, change] :
       {std::pair{"rope.struct_size", +[](flashplan_rope& r) { r.struct_size = 3; }},
        {"rope.reserved", +[](flashplan_rope& r) { r.reserved = 3; }},
        {"rope.theta", +[](flashplan_rope& r) { r.theta = 0.0; }}}) {
    flashplan_rope wrong = rope;
    change(wrong);
    options.rope = &wrong;
    const flashplan_status status = flashplan_plan_create(&options, &other, message);
    check_refused(as_status(status, message), StatusCode::kInvalidArgument, argument);
  }
}

}  // namespace
}  // namespace flashplan::test
