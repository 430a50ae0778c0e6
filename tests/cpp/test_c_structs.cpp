// SPDX-License-Identifier: Apache-2.0
// The structs of the C interface, in every version, and what it refuses.
#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "c_structs.h"
#include "check.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c.h"
#include "problem.h"
#include "refusal.h"
#include "small_options.h"

namespace flashplan::test {
namespace {

// A caller's struct with fields that a later version adds.
template <typename T>
struct Larger {
  T known;
  int64_t added;
};

TEST(defaults_are_those_of_the_cpp_interface) {
  flashplan_options c;
  flashplan_options_init(&c, sizeof(c));
  const flashplan_options expected = c_options({});
  CHECK(std::memcmp(&c, &expected, sizeof(c)) == 0);
  CHECK_EQ(c.struct_size, sizeof(c));
  CHECK_EQ(c.causal, 1);
  CHECK_EQ(c.window_left, -1);
  CHECK_EQ(c.max_qo_tokens, AttentionOptions().max_qo_tokens);

  // Of a program that was compiled with another version.
  Larger<flashplan_options> larger;
  std::memset(&larger, 0xff, sizeof(larger));
  flashplan_options_init(&larger.known, sizeof(larger));
  CHECK_EQ(larger.known.struct_size, sizeof(larger));
  CHECK_EQ(larger.added, 0);
  std::array<unsigned char, sizeof(flashplan_options)> older;
  older.fill(0xff);
  flashplan_options_init(reinterpret_cast<flashplan_options*>(older.data()), 44);
  CHECK_EQ(older[40],
           static_cast<unsigned char>(FLASHPLAN_BFLOAT16));  // o_dtype, the last one within
  CHECK_EQ(older[44], 0xff);
  // What is no struct is left alone.
  older.fill(0xff);
  flashplan_options_init(reinterpret_cast<flashplan_options*>(older.data()), 7);
  CHECK_EQ(older[0], 0xff);
  flashplan_options_init(nullptr, sizeof(c));
}

TEST(structs_of_other_versions) {
  Larger<flashplan_options> larger = {c_options(small_options()), 0};
  larger.known.struct_size = sizeof(larger);
  Message message;
  CHECK_EQ(flashplan_is_supported(&larger.known, message), FLASHPLAN_OK);
  const auto refused = [&](const flashplan_options* options, const char* argument) {
    const flashplan_status status = flashplan_is_supported(options, message);
    check_refused(as_status(status, message), StatusCode::kInvalidArgument, argument);
  };
  larger.added = int64_t{1} << 56;  // its last byte
  refused(&larger.known, "options.struct_size");
  larger.added = 0;
  constexpr size_t kBeforeTheFirst = 95;
  for (const size_t size : {size_t{0}, kBeforeTheFirst, SIZE_MAX}) {
    larger.known.struct_size = size;
    refused(&larger.known, "options.struct_size");
  }
  // Nothing but zeros is behind the known fields, so the size alone is wrong.
  constexpr size_t kMost = 4096;
  std::vector<flashplan_options> zeros(kMost / sizeof(flashplan_options) + 2, flashplan_options{});
  zeros[0] = larger.known;
  zeros[0].struct_size = kMost;
  CHECK_EQ(flashplan_is_supported(zeros.data(), message), FLASHPLAN_OK);
  zeros[0].struct_size = kMost + 1;
  refused(zeros.data(), "options.struct_size");
  refused(nullptr, "options");
}

TEST(tensors_are_contiguous_at_first) {
  const int64_t shape[] = {2, 3, 5, 7, 11};
  float data = 0;
  flashplan_tensor t;
  flashplan_tensor_init(&t, sizeof(t), &data, FLASHPLAN_BFLOAT16, 3, shape);
  CHECK_EQ(t.struct_size, sizeof(t));
  CHECK(t.data == &data);
  CHECK_EQ(t.dtype, FLASHPLAN_BFLOAT16);
  CHECK_EQ(t.rank, 3);
  CHECK_EQ(t.shape[2], 5);
  CHECK_EQ(t.shape[3], 0);
  CHECK_EQ(t.stride[0], 15);
  CHECK_EQ(t.stride[1], 5);
  CHECK_EQ(t.stride[2], 1);
  CHECK_EQ(t.read_only, 0);
  flashplan_tensor_init(&t, sizeof(t), &data, FLASHPLAN_FLOAT32, 4, shape);
  CHECK_EQ(t.stride[0], 105);
  for (const int32_t rank : {5, -1, 1 << 30}) {
    flashplan_tensor_init(&t, sizeof(t), &data, FLASHPLAN_FLOAT32, rank, shape);
    CHECK_EQ(t.rank, rank);
    CHECK_EQ(t.shape[0], 0);
    CHECK_EQ(t.stride[0], 0);
  }
  flashplan_tensor_init(&t, sizeof(t), &data, FLASHPLAN_FLOAT32, 2, nullptr);
  CHECK_EQ(t.shape[0], 0);
}

TEST(refusals) {
  Problem p;
  p.options = small_options();
  p.batch.add(1, 40);
  Random random(1);
  fill_problem(random, p);
  const CPlan plan = create(c_options(p.options));
  Workspace workspace(flashplan_plan_workspace_bytes(plan.get()));
  Outputs out(p);
  const Outputs untouched = out;
  CTensors owner;
  const flashplan_attention_tensors tensors = c_tensors(tensors_of(p, out, workspace), owner);
  Message message;
  const auto check = [&](flashplan_status status, StatusCode code, const char* argument) {
    check_refused(as_status(status, message), code, argument);
    CHECK(out == untouched);
  };
  const auto invalid = StatusCode::kInvalidArgument;
  check(flashplan_plan_run(plan.get(), &tensors, nullptr, message), StatusCode::kNotReady, "run");

  const flashplan_batch batch = c_batch(p.batch_view());
  check(flashplan_plan_plan(nullptr, &batch, nullptr, message), invalid, "plan");
  check(flashplan_plan_plan(plan.get(), nullptr, nullptr, message), invalid, "batch");
  const int32_t negative[] = {-3};
  flashplan_batch wrong_batch = batch;
  wrong_batch.kv_lens = negative;
  check(flashplan_plan_plan(plan.get(), &wrong_batch, nullptr, message), invalid, "kv_lens[0]");
  CHECK_EQ(flashplan_plan_plan(plan.get(), &wrong_batch, nullptr, nullptr),
           FLASHPLAN_INVALID_ARGUMENT);
  CHECK_EQ(flashplan_plan_plan(plan.get(), &batch, nullptr, message), FLASHPLAN_OK);
  CHECK_EQ(std::string(message), "");

  check(flashplan_plan_run(nullptr, &tensors, nullptr, message), invalid, "plan");
  check(flashplan_plan_run(plan.get(), nullptr, nullptr, message), invalid, "tensors");
  struct Bad {
    const char* argument;
    std::function<void(flashplan_attention_tensors&, flashplan_tensor&)> change;  // of q
    StatusCode code = StatusCode::kInvalidArgument;
  };
  const auto type = StatusCode::kInvalidType;
  const std::vector<Bad> all = {
      {"tensors.struct_size", [](auto& t, auto&) { t.struct_size = 8; }},
      {"tensors.reserved", [](auto& t, auto&) { t.reserved = 1; }},
      {"tensors.reserved", [](auto& t, auto&) { t.reserved2 = 1; }},
      {"q.struct_size", [](auto&, auto& q) { q.struct_size = 0; }},
      {"q.reserved", [](auto&, auto& q) { q.reserved = 1; }},
      {"q.rank", [](auto&, auto& q) { q.rank = 0; }},
      {"q", [](auto&, auto& q) { q.rank = 5; }},
      {"q", [](auto&, auto& q) { q.shape[1] = 3; }},
      {"q", [](auto&, auto& q) { q.dtype = 77; }, type},
      {"q", [](auto&, auto& q) { q.device_type = FLASHPLAN_CUDA; }, type},
      {"q", [](auto& t, auto&) { t.q = nullptr; }},
      {"out", [](auto& t, auto& q) { (q = *t.out).read_only = 1, t.out = &q; }, type},
      {"mask", [](auto& t, auto&) { t.mask = t.lse; }},
      {"sinks", [](auto& t, auto&) { t.sinks = t.lse; }},
      {"q_scale", [](auto& t, auto&) { t.q_scales = t.lse; }},
      {"q_scale", [](auto& t, auto&) { t.q_scale = 2.0F; }},
      {"k_scale", [](auto& t, auto&) { t.k_scales = t.lse; }},
      {"v_scale", [](auto& t, auto&) { t.v_scales = t.lse; }},
      {"kv_lens", [](auto& t, auto&) { t.kv_lens = t.lse; }, type},
      {"k_scale", [](auto& t, auto&) { t.k_scale = 0.0F; }},
      {"v_scale", [](auto& t, auto&) { t.v_scale = -1.0F; }},
      {"workspace", [](auto& t, auto&) { t.workspace = nullptr; }},
      {"workspace", [](auto& t, auto&) { t.workspace_bytes -= 1; }},
  };
  for (const Bad& bad : all) {
    flashplan_attention_tensors t = tensors;
    flashplan_tensor q = *t.q;
    t.q = &q;
    bad.change(t, q);
    check(flashplan_plan_run(plan.get(), &t, nullptr, message), bad.code, bad.argument);
  }
  CHECK_EQ(flashplan_plan_run(plan.get(), &tensors, nullptr, message), FLASHPLAN_OK);
  CHECK_EMPTY(wrong_output(p, out));
}

TEST(plans_that_can_not_be_made) {
  flashplan_options options = c_options(small_options());
  options.num_kv_heads = 3;
  const CPlan other = create(c_options(small_options()));
  flashplan_plan* plan = other.get();
  Message message;
  flashplan_status status = flashplan_plan_create(&options, &plan, message);
  check_refused(as_status(status, message), StatusCode::kInvalidArgument, "num_qo_heads");
  CHECK(plan == nullptr);
  status = flashplan_plan_create(&options, nullptr, message);
  check_refused(as_status(status, message), StatusCode::kInvalidArgument, "plan");
  size_t bytes = 77;
  status = flashplan_workspace_bytes(&options, &bytes, message);
  check_refused(as_status(status, message), StatusCode::kInvalidArgument, "num_qo_heads");
  CHECK_EQ(bytes, 77U);
  options = c_options(small_options());
  status = flashplan_workspace_bytes(&options, nullptr, message);
  check_refused(as_status(status, message), StatusCode::kInvalidArgument, "bytes");
  options.q_dtype = FLASHPLAN_INT32;
  CHECK_EQ(flashplan_is_supported(&options, message), FLASHPLAN_UNSUPPORTED);
  CHECK(std::string(message).find("q_dtype: expected ") == 0);
}

TEST(texts) {
  const CPlan plan = create(c_options(small_options()));
  CHECK_EQ(std::string(flashplan_plan_kernel_name(nullptr)), "");
  CHECK(std::string(flashplan_plan_kernel_name(plan.get())).find("cpu") == 0);
  CHECK_EQ(std::string(flashplan_version()), version());
  CHECK_EQ(flashplan_plan_workspace_bytes(nullptr), 0U);
  flashplan_plan_destroy(nullptr);

  const std::string expected = show_config();
  const size_t length = flashplan_show_config(nullptr, 0);
  CHECK_EQ(length, expected.size());
  std::vector<char> text(length + 2, 'x');
  CHECK_EQ(flashplan_show_config(text.data(), length + 1), length);
  CHECK_EQ(std::string(text.data()), expected);
  CHECK_EQ(text[length + 1], 'x');
  CHECK_EQ(flashplan_show_config(text.data(), 4), length);
  CHECK_EQ(std::string(text.data()), expected.substr(0, 3));
  const size_t described = flashplan_plan_describe(plan.get(), text.data(), 8);
  CHECK_EQ(described, std::string("no plan yet\n").size());
  CHECK_EQ(std::string(text.data()), "no plan");
  CHECK_EQ(flashplan_plan_describe(nullptr, text.data(), 8), 0U);
  CHECK_EQ(std::string(text.data()), "");

  CHECK_EQ(std::string(flashplan_status_name(FLASHPLAN_OK)), "FLASHPLAN_OK");
  CHECK_EQ(std::string(flashplan_status_name(FLASHPLAN_CUDA_ERROR)), "FLASHPLAN_CUDA_ERROR");
  CHECK_EQ(std::string(flashplan_status_name(7)), "unknown");
  CHECK_EQ(std::string(flashplan_status_name(-1)), "unknown");
  for (int32_t code = FLASHPLAN_OK; code <= FLASHPLAN_CUDA_ERROR; ++code) {
    CHECK(std::string(flashplan_status_name(code)).find("FLASHPLAN_") == 0);
  }
}

TEST(threads) {
  const int32_t before = flashplan_num_threads();
  Message message;
  const flashplan_status status = flashplan_set_num_threads(0, message);
  check_refused(as_status(status, message), StatusCode::kInvalidArgument, "num_threads");
  CHECK_EQ(flashplan_num_threads(), before);
  CHECK_EQ(flashplan_set_num_threads(before, nullptr), FLASHPLAN_OK);
}

}  // namespace
}  // namespace flashplan::test
