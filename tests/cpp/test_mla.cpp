// SPDX-License-Identifier: Apache-2.0
// append_mla() and gather_mla() in C++ and in C: the same bytes, and what is refused.
#include <cstring>

#include "c_operators.h"
#include "c_structs.h"
#include "check.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c_ops.h"
#include "host_tensor.h"
#include "problem.h"
#include "refusal.h"

namespace flashplan::test {
namespace {

constexpr auto kInvalid = StatusCode::kInvalidArgument;

/// Tokens of 8 and 4 dims, and a cache of three pages of four tokens in two tensors.
struct Mla {
  HostTensor kv_c = random_tensor(1, DType::kBFloat16, {3, 8});
  HostTensor k_pe = random_tensor(2, DType::kBFloat16, {3, 4});
  HostTensor latent = HostTensor(DType::kBFloat16, {3, 4, 8});
  HostTensor tail = HostTensor(DType::kBFloat16, {3, 4, 4});
  HostTensor weight = random_tensor(3, DType::kFloat32, {8});
  HostTensor q_pe = random_tensor(4, DType::kBFloat16, {3, 2, 4});
  int64_t slots[3] = {9, 10, 11};
  int32_t positions[3] = {0, 100, 200};
  int32_t table[2] = {1, 2};
  int32_t kv_indptr[2] = {0, 3};
  int32_t starts[1] = {5};
  HostTensor out = HostTensor(DType::kBFloat16, {3, 8});
  HostTensor out_tail = HostTensor(DType::kBFloat16, {3, 4});

  MlaAppendTensors new_tokens() const {
    MlaAppendTensors t;
    t.kv_c = kv_c.view();
    t.k_pe = k_pe.view();
    t.cache = {latent.view(), tail.view()};
    t.slot_mapping = contiguous(slots, DType::kInt64, Device{}, {3});
    t.norm_weight = weight.view();
    t.positions = contiguous(positions, DType::kInt32, Device{}, {3});
    t.q_pe = q_pe.view();
    t.eps = 0.25F;
    return t;
  }
  MlaGatherTensors chunk() const {
    MlaGatherTensors t;
    t.cache = {latent.view(), tail.view()};
    t.block_table = contiguous(table, DType::kInt32, Device{}, {1, 2});
    t.kv_indptr = contiguous(kv_indptr, DType::kInt32, Device{}, {2});
    t.starts = contiguous(starts, DType::kInt32, Device{}, {1});
    t.out = out.view();
    t.out_tail = out_tail.view();
    return t;
  }
};

TEST(the_c_interface_appends_and_gathers_the_same) {
  const Mla expected, actual;
  const Rope rope;
  CHECK(append_mla(expected.new_tokens(), &rope).ok());
  CHECK(gather_mla(expected.chunk()).ok());
  CHECK(expected.out.bytes() != Mla().out.bytes());
  CHECK(expected.q_pe.bytes() != Mla().q_pe.bytes());

  CTensors owner;
  Message message;
  const MlaAppendTensors t = actual.new_tokens();
  auto c = started(flashplan_mla_append_tensors_init);
  c.kv_c = owner.add(t.kv_c);
  c.k_pe = owner.add(t.k_pe);
  c.cache = owner.add(t.cache.latent);
  c.cache_tail = owner.add(t.cache.tail);
  c.slot_mapping = owner.add(t.slot_mapping);
  c.norm_weight = owner.add(t.norm_weight);
  c.positions = owner.add(t.positions);
  c.q_pe = owner.add(t.q_pe);
  CHECK_EQ(c.scale, 1.0F);
  CHECK_EQ(c.eps, MlaAppendTensors().eps);
  c.eps = 0.25F;
  auto turns = started(flashplan_rope_init);
  check_ok(flashplan_append_mla(&c, &turns, nullptr, message), message);
  CHECK(actual.latent.bytes() == expected.latent.bytes());
  CHECK(actual.tail.bytes() == expected.tail.bytes());
  CHECK(actual.q_pe.bytes() == expected.q_pe.bytes());

  const MlaGatherTensors g = actual.chunk();
  auto chunk = started(flashplan_mla_gather_tensors_init);
  chunk.cache = owner.add(g.cache.latent);
  chunk.cache_tail = owner.add(g.cache.tail);
  chunk.block_table = owner.add(g.block_table);
  chunk.kv_indptr = owner.add(g.kv_indptr);
  chunk.starts = owner.add(g.starts);
  chunk.out = owner.add(g.out);
  chunk.out_tail = owner.add(g.out_tail);
  CHECK_EQ(chunk.scale, 1.0F);
  check_ok(flashplan_gather_mla(&chunk, nullptr, message), message);
  CHECK(actual.out.bytes() == expected.out.bytes());
  CHECK(actual.out_tail.bytes() == expected.out_tail.bytes());

  const auto refused = [&](flashplan_status status, const char* argument) {
    check_refused(as_status(status, message), kInvalid, argument);
  };
  refused(flashplan_append_mla(nullptr, &turns, nullptr, message), "tensors");
  refused(flashplan_append_mla(&c, nullptr, nullptr, message), "positions");
  c.scale = 0.0F;
  refused(flashplan_append_mla(&c, &turns, nullptr, message), "scale");
  refused(flashplan_gather_mla(nullptr, nullptr, message), "tensors");
  chunk.reserved = 1;
  refused(flashplan_gather_mla(&chunk, nullptr, message), "tensors.reserved");
}

TEST(what_is_refused_writes_nothing) {
  const Mla mla;
  const Rope rope;
  const auto refused = [&](const auto& change, const char* argument) {
    MlaAppendTensors t = mla.new_tokens();
    change(t);
    check_refused(append_mla(t, &rope), kInvalid, argument);
    CHECK(mla.latent.bytes() == Mla().latent.bytes());
    CHECK(mla.q_pe.bytes() == Mla().q_pe.bytes());
  };
  refused([](auto& t) { t.cache.tail = {}; }, "cache");
  refused([](auto& t) { t.cache.latent.shape[1] = 3; }, "cache_tail");
  refused([](auto& t) { t.q_pe.shape[0] = 2; }, "q_pe");
  refused([](auto& t) { t.kv_c.shape[0] = 2; }, "slot_mapping");
  refused([&](auto& t) { t.q_pe.data = mla.latent.view().data; }, "cache");
  const HostTensor outside = float_tensor({0.0});
  MlaGatherTensors g = mla.chunk();
  g.starts = outside.view();
  check_refused(gather_mla(g), StatusCode::kInvalidType, "starts");
}

/// Five query tokens of two heads over a cache of four pages of four keys of 6 dims, of which 4 are
/// values.
struct Latents {
  AttentionOptions options;
  HostTensor q = random_tensor(1, DType::kFloat32, {5, 2, 6});
  HostTensor cache = random_tensor(2, DType::kFloat32, {4, 4, 6});
  HostTensor o = HostTensor(DType::kFloat32, {5, 2, 4});
  HostTensor lse = HostTensor(DType::kFloat32, {5, 2});
  int32_t table[4] = {2, 0, 3, 0};

  Latents() {
    options.num_qo_heads = 2;
    options.num_kv_heads = 1;
    options.head_dim_qk = 6;
    options.head_dim_vo = 4;
    options.page_size = 4;
    options.q_dtype = options.kv_dtype = options.o_dtype = DType::kFloat32;
    options.shared_kv = true;
    options.softmax_scale = 0.5F;
  }
  static TensorView dims(const HostTensor& tensor, int64_t begin, int64_t end) {
    TensorView view = tensor.view();
    view.data = static_cast<float*>(view.data) + begin;
    view.shape[2] = end - begin;
    return view;
  }
  AttentionTensors tensors(Workspace& workspace) {
    AttentionTensors t;
    t.q = q.view();
    t.k = cache.view();
    t.block_table = contiguous(table, DType::kInt32, Device{}, {2, 2});
    t.o = o.view();
    t.lse = lse.view();
    t.workspace = workspace.data();
    t.workspace_bytes = workspace.size();
    return t;
  }
};

TEST(parts_lists_and_the_c_interface_give_the_same) {
  Latents whole;
  const int32_t qo[] = {0, 2, 5}, kv[] = {7, 5};
  Batch batch;
  batch.qo_indptr = qo;
  batch.kv_lens = kv;
  batch.batch_size = 2;
  Plan plan;
  CHECK(Plan::create(whole.options, &plan).ok());
  Workspace workspace(plan.workspace_bytes());
  CHECK(plan.plan(batch).ok());
  CHECK(plan.run(whole.tensors(workspace)).ok());

  Latents parts;
  AttentionTensors t = parts.tensors(workspace);
  t.q = Latents::dims(parts.q, 0, 4);
  t.q_tail = Latents::dims(parts.q, 4, 6);
  t.k = Latents::dims(parts.cache, 0, 4);
  t.k_tail = Latents::dims(parts.cache, 4, 6);
  CHECK(plan.run(t).ok());
  CHECK(parts.o.bytes() == whole.o.bytes());
  CHECK(parts.lse.bytes() == whole.lse.bytes());

  Message message;
  CTensors owner;
  Latents in_c;
  t = in_c.tensors(workspace);
  t.q = Latents::dims(in_c.q, 0, 4);
  t.q_tail = Latents::dims(in_c.q, 4, 6);
  const CPlan c_plan = create(c_options(in_c.options));
  const flashplan_batch c_lengths = c_batch(batch);
  check_ok(flashplan_plan_plan(c_plan.get(), &c_lengths, nullptr, message), message);
  const flashplan_attention_tensors c = c_tensors(t, owner);
  check_ok(flashplan_plan_run(c_plan.get(), &c, nullptr, message), message);
  CHECK(in_c.o.bytes() == whole.o.bytes());

  // The keys that the last query of each request sees, in their order.
  Latents listed;
  listed.options.topk = 8;
  const CPlan sparse = create(c_options(listed.options));
  const int32_t lists[5][8] = {{-1, 8, 9, 10, 11, 0, 1, 99},
                               {8, 9, 10, 11, 0, 1, 2, -1},
                               {12, 13, 14, 99, 99, 99, 99, 99},
                               {12, 13, 14, 15, -5, 99, 99, 99},
                               {12, 13, 14, 15, 0, -1, -1, -1}};
  check_ok(flashplan_plan_plan(sparse.get(), &c_lengths, nullptr, message), message);
  t = listed.tensors(workspace);
  t.block_table = {};
  t.topk_indices = contiguous(&lists[0][0], DType::kInt32, Device{}, {5, 8});
  Workspace other(flashplan_plan_workspace_bytes(sparse.get()));
  t.workspace = other.data();
  t.workspace_bytes = other.size();
  const flashplan_attention_tensors c_lists = c_tensors(t, owner);
  check_ok(flashplan_plan_run(sparse.get(), &c_lists, nullptr, message), message);
  CHECK(listed.o.bytes() == whole.o.bytes());
  CHECK(listed.lse.bytes() == whole.lse.bytes());
}

}  // namespace
}  // namespace flashplan::test
