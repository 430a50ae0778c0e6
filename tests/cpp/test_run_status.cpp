// SPDX-License-Identifier: Apache-2.0
// Every way run() can refuse tensors on the host: the code, the named argument, and that nothing is
// written.
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "flashplan/flashplan.h"
#include "problem.h"
#include "refusal.h"
#include "small_options.h"

namespace flashplan::test {
namespace {

/// A change to the tensors of a run that must be refused.
struct BadTensors {
  const char* argument;
  std::function<void(AttentionTensors&)> change;
  StatusCode code = StatusCode::kInvalidArgument;
};

/// Runs `p` with each of the changes, which must be refused and write nothing, then without any.
void check_tensors(const Problem& p, const std::vector<BadTensors>& all) {
  Plan plan;
  CHECK(Plan::create(p.options, &plan).ok());
  CHECK(plan.plan(p.batch_view()).ok());
  Workspace workspace(plan.workspace_bytes());
  Outputs out(p);
  const Outputs untouched = out;
  for (const BadTensors& bad : all) {
    AttentionTensors t = tensors_of(p, out, workspace);
    bad.change(t);
    check_refused(plan.run(t), bad.code, bad.argument);
    CHECK(out == untouched);
  }
  CHECK_EQ(plan.run(tensors_of(p, out, workspace)).message, std::string());
  CHECK_EMPTY(wrong_output(p, out));
}

/// Two requests, and tensors for them.
Problem small_run(int32_t page_size = 0) {
  Problem p;
  p.options = small_options(page_size);
  p.batch.add(1, 40);
  p.batch.add(3, 20);
  Random random(1);
  fill_problem(random, p);
  return p;
}

TEST(tensors_of_every_layout) {
  const auto type = StatusCode::kInvalidType;
  const HostTensor lens = int_tensor({40, 20});
  const auto with_lens = [&](const auto& change) {
    return [&lens, change](AttentionTensors& t) {
      t.kv_lens = lens.view();
      change(t.kv_lens);
    };
  };
  const std::vector<BadTensors> all = {
      {"q", [](auto& t) { t.q = {}; }},
      {"q", [](auto& t) { t.q.shape[0] = 3; }},
      {"q", [](auto& t) { t.q.shape[1] = 2; }},
      {"q", [](auto& t) { t.q.shape[2] = 16; }},
      {"q", [](auto& t) { t.q.rank = 2; }},
      {"q", [](auto& t) { t.q.rank = 5; }},
      {"q", [](auto& t) { t.q.rank = -1; }},
      {"q", [](auto& t) { t.q.data = nullptr; }},
      {"q", [](auto& t) { t.q.data = static_cast<char*>(t.q.data) + 1; }},
      {"q", [](auto& t) { t.q.stride[2] = 2; }},
      {"q", [](auto& t) { t.q.stride[0] = -32; }},
      {"q", [](auto& t) { t.q.dtype = DType::kBFloat16; }, type},
      {"q", [](auto& t) { t.q.device.type = DeviceType::kCuda; }, type},
      {"kv_lens", with_lens([](TensorView& view) { view.shape[0] = 1; })},
      {"kv_lens", with_lens([](TensorView& view) { view.rank = 2; })},
      {"kv_lens", with_lens([](TensorView& view) { view.dtype = DType::kFloat32; }), type},
      {"kv_lens", with_lens([](TensorView& view) { view.device.type = DeviceType::kCuda; }), type},
      {"mask", [&](auto& t) { t.mask = lens.view(); }},
      {"k", [](auto& t) { t.k.shape[0] = 59; }},
      {"k", [](auto& t) { t.k.shape[1] = 4; }},
      {"k", [](auto& t) { t.k.dtype = DType::kFloat8E5M2; }, type},
      {"v", [](auto& t) { t.v.shape[2] = 7; }},
      {"v",
       [](auto& t) {
         t.v.device.index = 3;
         t.v.device.type = DeviceType::kCuda;
       },
       type},
      {"out", [](auto& t) { t.o.shape[0] = 2; }},
      {"out", [](auto& t) { t.o.read_only = true; }, type},
      {"out", [](auto& t) { t.o.stride[0] = 0; }},
      {"out", [](auto& t) { t.o.data = t.q.data; }},
      {"out", [](auto& t) { t.o.data = t.v.data; }},
      {"out", [](auto& t) { t.o.dtype = DType::kFloat16; }, type},
      {"lse", [](auto& t) { t.lse.dtype = DType::kFloat16; }, type},
      {"lse", [](auto& t) { t.lse.shape[1] = 5; }},
      {"lse", [](auto& t) { t.lse.read_only = true; }, type},
      {"lse", [](auto& t) { t.lse.data = t.k.data; }},
      {"out", [](auto& t) { t.lse.data = t.o.data; }},
      {"block_table", [](auto& t) { t.block_table = t.lse; }},
      {"k_scale", [](auto& t) { t.k_scale = 0.0F; }},
      {"v_scale", [](auto& t) { t.v_scale = std::numeric_limits<float>::quiet_NaN(); }},
      {"workspace", [](auto& t) { t.workspace = nullptr; }},
      {"workspace", [](auto& t) { t.workspace_bytes -= 1; }},
      {"workspace", [](auto& t) { t.workspace = static_cast<char*>(t.workspace) + 4; }},
  };
  check_tensors(small_run(), all);
}

TEST(a_workspace_that_is_null_is_called_so) {
  const Problem p = small_run();
  Plan plan;
  CHECK(Plan::create(p.options, &plan).ok());
  CHECK(plan.plan(p.batch_view()).ok());
  Workspace workspace(plan.workspace_bytes());
  Outputs out(p);
  AttentionTensors t = tensors_of(p, out, workspace);
  t.workspace = nullptr;
  CHECK_EQ(plan.run(t).message,
           "workspace: expected " + std::to_string(t.workspace_bytes) + " bytes, got null");
}

TEST(masks) {
  const auto type = StatusCode::kInvalidType;
  Problem p = small_run();
  p.options.custom_mask = true;
  p.mask_begin = {0, 20};  // two words
  p.mask = HostTensor(DType::kUInt32, {4, 2});
  const std::vector<BadTensors> all = {
      {"mask", [](auto& t) { t.mask = {}; }},
      {"mask", [](auto& t) { t.mask.shape[0] = 3; }},
      {"mask", [](auto& t) { t.mask.shape[1] = 1; }},
      {"mask", [](auto& t) { t.mask.rank = 1; }},
      {"mask", [](auto& t) { t.mask.dtype = DType::kInt32; }, type},
      {"mask", [](auto& t) { t.mask.device.type = DeviceType::kCuda; }, type},
      {"out", [](auto& t) { t.mask.data = t.o.data; }},
  };
  check_tensors(p, all);
  Plan plan;
  CHECK(Plan::create(p.options, &plan).ok());
  CHECK(plan.plan(p.batch_view()).ok());
  p.mask_begin[1] = -1;
  check_refused(plan.plan(p.batch_view()), StatusCode::kInvalidArgument, "mask_begin[1]");
  p.mask_begin[1] = 20;
  Workspace workspace(plan.workspace_bytes());
  Outputs out(p);
  CHECK_EQ(plan.run(tensors_of(p, out, workspace)).message, std::string());  // of the last plan
  CHECK_EMPTY(wrong_output(p, out));
  p.options.custom_mask = false;
  CHECK(Plan::create(p.options, &plan).ok());
  check_refused(plan.plan(p.batch_view()), StatusCode::kInvalidArgument, "mask_begin");
}

TEST(tensors_of_a_paged_cache) {
  const auto type = StatusCode::kInvalidType;
  HostTensor table(DType::kInt32, {2, 3});
  HostTensor indices(DType::kInt32, {5});
  HostTensor indptr = int_tensor({0, 3, 5});
  const auto block_table = [&](AttentionTensors& t) {
    for (int64_t i = 0; i < 6; ++i) table.set_bits({i / 3, i % 3}, static_cast<uint32_t>(i % 5));
    t.page_indptr = t.page_indices = {};
    t.block_table = table.view();
  };
  const auto csr = [&](AttentionTensors& t) {
    for (int64_t i = 0; i < 5; ++i) indices.set_bits({i}, static_cast<uint32_t>(i));
    indptr = int_tensor({0, 3, 5});
    t.block_table = {};
    t.page_indptr = indptr.view();
    t.page_indices = indices.view();
  };
  const auto after = [](const auto& first, const auto& then) {
    return [&first, then](AttentionTensors& t) {
      first(t);
      then(t);
    };
  };
  const std::vector<BadTensors> all = {
      {"k", [](auto& t) { t.k.shape[1] = 8; }},
      {"k", [](auto& t) { t.k.rank = 3; }},
      // Pages of k that v has not, and of v that k has not: ids go up to 4.
      {"block_table[0, 1]", after(block_table, [](auto& t) { t.v.shape[0] = 1; })},
      {"block_table[0, 1]", after(block_table, [](auto& t) { t.k.shape[0] = 1; })},
      {"v", [](auto& t) { t.v.shape[2] = 1; }},
      {"block_table", [](auto& t) { t.block_table = t.page_indptr = t.page_indices = {}; }},
      {"block_table", after(block_table, [&](auto& t) { t.page_indptr = indptr.view(); })},
      {"block_table", after(csr, [&](auto& t) { t.page_indices = {}; })},
      {"block_table", after(block_table, [&](auto& t) { t.block_table.shape[0] = 1; })},
      {"block_table", after(block_table, [&](auto& t) { t.block_table.shape[1] = 2; })},
      {"block_table", after(block_table, [&](auto& t) { t.block_table.rank = 1; })},
      {"block_table", after(block_table, [&](auto& t) { t.block_table.dtype = DType::kFloat32; }),
       type},
      {"block_table[1, 1]", after(block_table, [&](auto&) { table.set_bits({1, 1}, 0x7fffffff); })},
      {"block_table[0, 2]", after(block_table, [&](auto&) { table.set_bits({0, 2}, 0xffffffff); })},
      {"page_indptr", after(csr, [&](auto& t) { t.page_indptr.shape[0] = 2; })},
      {"page_indptr[1]", after(csr, [&](auto&) { indptr.set_bits({0}, 0xffffffff); })},
      {"page_indptr[1]", after(csr, [&](auto&) { indptr.set_bits({1}, 2); })},
      {"page_indptr[2]", after(csr, [&](auto&) { indptr.set_bits({2}, 6); })},
      {"page_indptr[2]", after(csr, [&](auto&) { indptr.set_bits({2}, 1); })},
      {"page_indices[4]", after(csr, [&](auto&) { indices.set_bits({4}, 1000); })},
      {"page_indices", after(csr, [&](auto& t) { t.page_indices.device.type = DeviceType::kCuda; }),
       type},
  };
  check_tensors(small_run(16), all);
}

}  // namespace
}  // namespace flashplan::test
