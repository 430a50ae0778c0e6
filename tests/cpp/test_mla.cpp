// SPDX-License-Identifier: Apache-2.0
// append_mla() and gather_mla() in C++ and in C: the same bytes, and what is refused.
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

}  // namespace
}  // namespace flashplan::test
