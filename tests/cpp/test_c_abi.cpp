// SPDX-License-Identifier: Apache-2.0
// The C interface does what the C++ one does, and takes structs of other versions.
#include <array>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c.h"
#include "problem.h"
#include "refusal.h"

namespace flashplan::test {
namespace {

struct Destroy {
  void operator()(flashplan_plan* plan) const { flashplan_plan_destroy(plan); }
};
using CPlan = std::unique_ptr<flashplan_plan, Destroy>;

/// Message of a call; full of what must be overwritten before it.
struct Message {
  char text[FLASHPLAN_MESSAGE_SIZE];
  Message() { std::memset(text, 'x', sizeof(text)); }
  operator char*() { return text; }
};

Status as_status(flashplan_status code, const Message& message) {
  Status status;
  status.code = static_cast<StatusCode>(code);
  std::memcpy(status.message, message.text, sizeof(status.message));
  return status;
}

flashplan_options c_options(const AttentionOptions& o) {
  flashplan_options c;
  std::memset(&c, 0xff, sizeof(c));
  flashplan_options_init(&c, sizeof(c));
  c.num_qo_heads = o.num_qo_heads;
  c.num_kv_heads = o.num_kv_heads;
  c.head_dim_qk = o.head_dim_qk;
  c.head_dim_vo = o.head_dim_vo;
  c.page_size = o.page_size;
  c.kv_layout = static_cast<int32_t>(o.kv_layout);
  c.q_dtype = static_cast<int32_t>(o.q_dtype);
  c.kv_dtype = static_cast<int32_t>(o.kv_dtype);
  c.o_dtype = static_cast<int32_t>(o.o_dtype);
  c.causal = o.causal ? 1 : 0;
  c.window_left = o.window_left;
  c.custom_mask = o.custom_mask ? 1 : 0;
  c.softmax_scale = o.softmax_scale.value_or(0.0F);
  c.softcap = o.softcap;
  c.max_batch_size = o.max_batch_size;
  c.max_qo_tokens = o.max_qo_tokens;
  c.num_ctas = o.num_ctas;
  c.batch_invariant = o.batch_invariant ? 1 : 0;
  c.workspace_bytes = o.workspace_bytes.value_or(0);
  return c;
}

flashplan_batch c_batch(const Batch& b) {
  flashplan_batch c;
  std::memset(&c, 0xff, sizeof(c));
  flashplan_batch_init(&c, sizeof(c));
  c.qo_indptr = b.qo_indptr;
  c.kv_lens = b.kv_lens;
  c.kv_indptr = b.kv_indptr;
  c.shared_prefixes = b.shared_prefixes;
  c.mask_begin = b.mask_begin;
  c.batch_size = b.batch_size;
  c.num_shared_prefixes = b.num_shared_prefixes;
  return c;
}

/// Owns the C tensors of a call.
class CTensors {
 public:
  /// Null for a tensor that is not given.
  const flashplan_tensor* add(const TensorView& view) {
    if (view.empty()) return nullptr;
    flashplan_tensor& t = tensors_.emplace_back();
    std::memset(&t, 0xff, sizeof(t));
    flashplan_tensor_init(&t, sizeof(t), view.data, static_cast<int32_t>(view.dtype), view.rank,
                          view.shape);
    t.device_type = static_cast<int32_t>(view.device.type);
    t.device_index = view.device.index;
    std::copy_n(view.stride, kMaxRank, t.stride);
    t.read_only = view.read_only ? 1 : 0;
    return &t;
  }

 private:
  std::list<flashplan_tensor> tensors_;
};

flashplan_attention_tensors c_tensors(const AttentionTensors& t, CTensors& owner) {
  flashplan_attention_tensors c;
  std::memset(&c, 0xff, sizeof(c));
  flashplan_attention_tensors_init(&c, sizeof(c));
  c.q = owner.add(t.q);
  c.k = owner.add(t.k);
  c.v = owner.add(t.v);
  c.block_table = owner.add(t.block_table);
  c.page_indptr = owner.add(t.page_indptr);
  c.page_indices = owner.add(t.page_indices);
  c.kv_lens = owner.add(t.kv_lens);
  c.mask = owner.add(t.mask);
  c.sinks = owner.add(t.sinks);
  c.k_scales = owner.add(t.k_scales);
  c.v_scales = owner.add(t.v_scales);
  c.out = owner.add(t.o);
  c.lse = owner.add(t.lse);
  c.k_scale = t.k_scale;
  c.v_scale = t.v_scale;
  c.workspace = t.workspace;
  c.workspace_bytes = t.workspace_bytes;
  return c;
}

CPlan create(const flashplan_options& options) {
  flashplan_plan* plan = nullptr;
  Message message;
  CHECK_EQ(flashplan_plan_create(&options, &plan, message), FLASHPLAN_OK);
  CHECK_EQ(std::string(message), "");
  return CPlan(plan);
}

TEST(runs_are_those_of_the_cpp_interface) {
  Random random(1);
  for (int i = 0; i < 200; ++i) {
    Problem p = random_problem(random);
    const int32_t batch_size = random.between(0, 4);
    for (int32_t r = 0; r < batch_size; ++r) {
      const int32_t qo_len = random.between(0, 5);
      p.batch.add(qo_len, qo_len + random.between(0, 60));
    }
    if (random.one_in(3)) plan_upper_bounds(random, p, 20);
    if (random.one_in(3)) add_mask(random, p);
    if (random.one_in(3)) add_sinks(random, p);
    if (random.one_in(3)) add_head_scales(random, p);
    fill_problem(random, p);
    Outputs expected(p);
    CHECK_EQ(run_problem(p, expected), "");
    CHECK_EMPTY(wrong_output(p, expected));

    const flashplan_options options = c_options(p.options);
    const CPlan plan = create(options);
    size_t bytes = 0;
    Message message;
    CHECK_EQ(flashplan_workspace_bytes(&options, &bytes, message), FLASHPLAN_OK);
    CHECK_EQ(flashplan_plan_workspace_bytes(plan.get()), bytes);
    const flashplan_batch batch = c_batch(p.batch_view());
    CHECK_EQ(flashplan_plan_plan(plan.get(), &batch, nullptr, nullptr), FLASHPLAN_OK);
    Workspace workspace(bytes);
    Outputs out(p);
    CTensors owner;
    const flashplan_attention_tensors tensors = c_tensors(tensors_of(p, out, workspace), owner);
    CHECK_EQ(flashplan_plan_run(plan.get(), &tensors, nullptr, message), FLASHPLAN_OK);
    CHECK_EQ(std::string(message), "");
    CHECK(out == expected);
  }
}

/// Two requests over pages of 4, the second of which begins with a page of the first.
struct Pages {
  HostTensor k{DType::kFloat32, {3, 2, 8}};
  HostTensor v{DType::kFloat32, {3, 2, 8}};
  HostTensor k_cache{DType::kFloat32, {5, 4, 2, 8}};
  HostTensor v_cache{DType::kFloat32, {5, 4, 2, 8}};
  HostTensor indptr = int_tensor({0, 1, 3});
  HostTensor kv_lens = int_tensor({5, 7});
  HostTensor table{DType::kInt32, {2, 2}};

  Pages() {
    Random random(7);
    fill_random(random, k, 3);
    fill_random(random, v, 3);
    constexpr uint32_t kIds[] = {4, 1, 4, 3};
    for (int64_t i = 0; i < 4; ++i) table.set_bits({i / 2, i % 2}, kIds[i]);
  }

  AppendTensors tensors() const {
    AppendTensors t;
    t.k = k.view();
    t.v = v.view();
    t.k_cache = k_cache.view();
    t.v_cache = v_cache.view();
    t.indptr = indptr.view();
    t.kv_lens = kv_lens.view();
    t.block_table = table.view();
    t.k_scale = 0.5F;
    t.v_scale = 2.0F;
    return t;
  }
};

flashplan_append_tensors c_append(const AppendTensors& t, CTensors& owner) {
  flashplan_append_tensors c;
  std::memset(&c, 0xff, sizeof(c));
  flashplan_append_tensors_init(&c, sizeof(c));
  c.k = owner.add(t.k);
  c.v = owner.add(t.v);
  c.k_cache = owner.add(t.k_cache);
  c.v_cache = owner.add(t.v_cache);
  c.indptr = owner.add(t.indptr);
  c.kv_lens = owner.add(t.kv_lens);
  c.block_table = owner.add(t.block_table);
  c.page_indptr = owner.add(t.page_indptr);
  c.page_indices = owner.add(t.page_indices);
  c.slot_mapping = owner.add(t.slot_mapping);
  c.k_scale = t.k_scale;
  c.v_scale = t.v_scale;
  c.kv_layout = static_cast<int32_t>(t.layout);
  return c;
}

TEST(appends_are_those_of_the_cpp_interface) {
  const Pages expected, pages;
  CHECK(append_paged_kv(expected.tensors()).ok());
  CTensors owner;
  const flashplan_append_tensors tensors = c_append(pages.tensors(), owner);
  Message message;
  CHECK_EQ(flashplan_append_paged_kv(&tensors, nullptr, message), FLASHPLAN_OK);
  CHECK_EQ(std::string(message), "");
  CHECK(pages.k_cache.bytes() == expected.k_cache.bytes());
  CHECK(pages.v_cache.bytes() == expected.v_cache.bytes());
  CHECK(pages.k_cache.bytes() != Pages().k_cache.bytes());

  int64_t slots[] = {-1, 3};
  AppendTensors to_slots = pages.tensors();
  to_slots.indptr = to_slots.kv_lens = to_slots.block_table = TensorView();
  to_slots.slot_mapping = contiguous(slots, DType::kInt64, Device(), {2});
  CHECK(append_paged_kv(to_slots).ok());
  to_slots.k_cache = expected.k_cache.view();
  to_slots.v_cache = expected.v_cache.view();
  const flashplan_append_tensors c_slots = c_append(to_slots, owner);
  CHECK_EQ(flashplan_append_paged_kv(&c_slots, nullptr, message), FLASHPLAN_OK);
  CHECK(pages.k_cache.bytes() == expected.k_cache.bytes());

  flashplan_append_tensors wrong = tensors;
  wrong.kv_layout = 2;
  flashplan_status status = flashplan_append_paged_kv(&wrong, nullptr, message);
  check_refused(as_status(status, message), StatusCode::kInvalidArgument, "kv_layout");
  wrong = tensors;
  wrong.reserved = 1;
  status = flashplan_append_paged_kv(&wrong, nullptr, message);
  check_refused(as_status(status, message), StatusCode::kInvalidArgument, "tensors.reserved");
  wrong = tensors;
  wrong.k_cache = nullptr;
  status = flashplan_append_paged_kv(&wrong, nullptr, message);
  CHECK(status != FLASHPLAN_OK);
  CHECK(std::string(message).find("k_cache: expected ") == 0);
}

TEST(prefixes_are_those_of_the_cpp_interface) {
  const Pages pages;
  const int32_t qo_indptr[] = {0, 1, 2};
  const int32_t kv_lens[] = {5, 7};
  Batch lengths;
  lengths.qo_indptr = qo_indptr;
  lengths.kv_lens = kv_lens;
  lengths.batch_size = 2;
  const flashplan_batch batch = c_batch(lengths);
  CTensors owner;
  const flashplan_tensor* table = owner.add(pages.table.view());
  std::array<int32_t, 3> group = {};
  int32_t count = -1;
  Message message;
  CHECK_EQ(flashplan_find_shared_prefixes(&batch, 4, table, nullptr, nullptr, group.data(), &count,
                                          message),
           FLASHPLAN_OK);
  CHECK_EQ(count, 1);
  CHECK(group == (std::array<int32_t, 3>{0, 2, 4}));

  const auto refused = [&](const char* argument, int32_t page_size, int32_t* groups,
                           int32_t* num_groups) {
    const flashplan_status status = flashplan_find_shared_prefixes(
        &batch, page_size, table, nullptr, nullptr, groups, num_groups, message);
    check_refused(as_status(status, message), StatusCode::kInvalidArgument, argument);
  };
  refused("page_size", 0, group.data(), &count);
  refused("groups", 4, nullptr, &count);
  refused("num_groups", 4, group.data(), nullptr);
}

TEST(merges_are_those_of_the_cpp_interface) {
  Random random(3);
  for (const int32_t num_states : {1, 8, 9, 20}) {
    std::vector<HostTensor> outputs, lses;
    std::vector<AttentionState> states;
    CTensors owner;
    std::vector<const flashplan_tensor*> o, lse;
    for (int32_t i = 0; i < num_states; ++i) {
      outputs.emplace_back(DType::kFloat32, std::vector<int64_t>{3, 2, 8});
      lses.emplace_back(DType::kFloat32, std::vector<int64_t>{3, 2});
      fill_random(random, outputs.back(), 3);
      for (int64_t j = 0; j < 6; ++j) lses.back().set({j / 2, j % 2}, random_element(random));
      states.push_back({outputs.back().view(), lses.back().view()});
      o.push_back(owner.add(states.back().o));
      lse.push_back(owner.add(states.back().lse));
    }
    const HostTensor expected_o(DType::kFloat32, {3, 2, 8}), expected_lse(DType::kFloat32, {3, 2});
    CHECK(merge_states(states.data(), num_states, {expected_o.view(), expected_lse.view()}).ok());
    const HostTensor out(DType::kFloat32, {3, 2, 8}), out_lse(DType::kFloat32, {3, 2});
    const flashplan_tensor* c_out = owner.add(out.view());
    const flashplan_tensor* c_lse = owner.add(out_lse.view());
    Message message;
    CHECK_EQ(
        flashplan_merge_states(o.data(), lse.data(), num_states, c_out, c_lse, nullptr, message),
        FLASHPLAN_OK);
    CHECK(out.bytes() == expected_o.bytes());
    CHECK(out_lse.bytes() == expected_lse.bytes());

    const auto refused = [&](const char* argument, const flashplan_tensor* const* states_o,
                             const flashplan_tensor* const* states_lse, int32_t count) {
      const flashplan_status status =
          flashplan_merge_states(states_o, states_lse, count, c_out, c_lse, nullptr, message);
      check_refused(as_status(status, message), StatusCode::kInvalidArgument, argument);
    };
    refused("o", nullptr, lse.data(), num_states);
    refused("lse", o.data(), nullptr, num_states);
    refused("num_states", o.data(), lse.data(), 0);
    flashplan_tensor broken = *lse.back();
    broken.struct_size = 0;
    lse.back() = &broken;
    const std::string argument = "lse[" + std::to_string(num_states - 1) + "].struct_size";
    refused(argument.c_str(), o.data(), lse.data(), num_states);
  }
}

AttentionOptions small_options() {
  AttentionOptions o;
  o.num_qo_heads = 4;
  o.num_kv_heads = 2;
  o.head_dim_qk = o.head_dim_vo = 8;
  o.q_dtype = o.kv_dtype = o.o_dtype = DType::kFloat32;
  return o;
}

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
  for (const size_t size : {size_t{0}, sizeof(flashplan_options) - 1, size_t{4097}, SIZE_MAX}) {
    larger.known.struct_size = size;
    refused(&larger.known, "options.struct_size");
  }
  refused(nullptr, "options");
}

TEST(tensors_are_contiguous_at_first) {
  const int64_t shape[] = {2, 3, 5, 7};
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
