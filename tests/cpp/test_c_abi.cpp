// SPDX-License-Identifier: Apache-2.0
// The C interface does what the C++ one does.
#include <array>
#include <cstring>
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
  HostTensor k_scales{DType::kFloat32, {2}};
  HostTensor v_scales{DType::kFloat32, {1}};

  Pages() {
    Random random(7);
    fill_random(random, k, 3);
    fill_random(random, v, 3);
    constexpr uint32_t kIds[] = {4, 1, 4, 3};
    for (int64_t i = 0; i < 4; ++i) table.set_bits({i / 2, i % 2}, kIds[i]);
    k_scales.set({0}, 3.0);
    k_scales.set({1}, 0.7);
    v_scales.set({0}, 1.1);
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
    t.k_scales = k_scales.view();
    t.v_scales = v_scales.view();
    return t;
  }
};

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

TEST(device_data_is_judged_as_by_the_cpp_interface) {
  const AttentionOptions options = small_options(4);
  const CPlan plan = create(c_options(options));
  Plan cpp;
  CHECK(Plan::create(options, &cpp).ok());
  HostBatch lengths;
  lengths.add(1, 7);
  const flashplan_batch batch = c_batch(lengths.view());
  Message message;
  CHECK_EQ(flashplan_plan_plan(plan.get(), &batch, nullptr, message), FLASHPLAN_OK);
  CHECK(cpp.plan(lengths.view()).ok());

  int32_t ids[] = {2, 4};
  int32_t indptr[] = {0, 2};
  int32_t kv_len = 7;
  int64_t slots[] = {-1, 19};
  DeviceData data;
  data.page_indptr = contiguous(indptr, DType::kInt32, Device(), {2});
  data.page_indices = contiguous(ids, DType::kInt32, Device(), {2});
  data.kv_lens = contiguous(&kv_len, DType::kInt32, Device(), {1});
  data.slot_mapping = contiguous(slots, DType::kInt64, Device(), {2});
  data.num_pages = 5;
  CTensors owner;
  auto c = started(flashplan_device_data_init);
  c.page_indptr = owner.add(data.page_indptr);
  c.page_indices = owner.add(data.page_indices);
  c.kv_lens = owner.add(data.kv_lens);
  c.slot_mapping = owner.add(data.slot_mapping);
  c.num_pages = 5;
  const auto judged_alike = [&](const char* argument) {
    const flashplan_status status =
        flashplan_plan_check_device_data(plan.get(), &c, nullptr, message);
    const Status expected = cpp.check_device_data(data);
    CHECK_EQ(std::string(message), std::string(expected.message));
    if (argument == nullptr) {
      CHECK_EQ(status, FLASHPLAN_OK);
    } else {
      check_refused(as_status(status, message), StatusCode::kInvalidArgument, argument);
    }
  };
  judged_alike(nullptr);
  slots[1] = 20;
  judged_alike("slot_mapping[1]");
  ids[1] = 5;
  judged_alike("page_indices[1]");
  c.num_pages = data.num_pages = 6;
  slots[1] = 23;
  judged_alike(nullptr);
  indptr[1] = 1;
  judged_alike("page_indptr[1]");
  kv_len = 8;
  judged_alike("kv_lens[0]");
  c.page_indptr = nullptr;
  data.page_indptr = TensorView();
  judged_alike("block_table");
  data.page_indices = TensorView();
  data.block_table = contiguous(ids, DType::kInt32, Device(), {1, 2});
  c.page_indices = nullptr;
  c.block_table = owner.add(data.block_table);
  kv_len = 7;
  judged_alike(nullptr);

  flashplan_status status = flashplan_plan_check_device_data(nullptr, &c, nullptr, message);
  check_refused(as_status(status, message), StatusCode::kInvalidArgument, "plan");
  status = flashplan_plan_check_device_data(plan.get(), nullptr, nullptr, message);
  check_refused(as_status(status, message), StatusCode::kInvalidArgument, "data");
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

    const AttentionState expected{expected_o.view(), expected_lse.view()};
    CHECK(merge_states(states.data(), num_states, expected, nullptr, true).ok());
    CHECK_EQ(flashplan_merge_states_base2(o.data(), lse.data(), num_states, c_out, c_lse, nullptr,
                                          message),
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

}  // namespace
}  // namespace flashplan::test
