// SPDX-License-Identifier: Apache-2.0
// Every call refuses outputs that share memory with anything else, and arguments that would be read
// before they were checked.
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "api/workspace_claim.h"
#include "check.h"
#include "flashplan/flashplan.h"
#include "problem.h"
#include "refusal.h"

namespace flashplan::test {
namespace {

using Argument = std::pair<const char*, TensorView*>;

/// A paged problem and a valid run of it, with both forms of a page table at hand.
struct Scene {
  Scene() {
    Random random(1);
    p.options.num_qo_heads = 4;
    p.options.num_kv_heads = 2;
    p.options.head_dim_qk = p.options.head_dim_vo = 8;
    p.options.q_dtype = p.options.kv_dtype = p.options.o_dtype = DType::kFloat32;
    p.options.page_size = 4;
    p.options.num_ctas = 2;
    p.batch.add(3, 9);
    p.batch.add(1, 6);
    fill_problem(random, p);
    table = HostTensor(DType::kInt32, {2, 3});
    std::vector<int32_t> ids;
    for (int64_t r = 0; r < 2; ++r) {
      const std::vector<int32_t>& pages = p.pages[static_cast<size_t>(r)];
      for (size_t c = 0; c < pages.size(); ++c) {
        table.set_bits({r, static_cast<int64_t>(c)}, static_cast<uint32_t>(pages[c]));
        ids.push_back(pages[c]);
      }
    }
    indices = int_tensor(ids);
    indptr = int_tensor({0, 3, 5});
    p.kv_lens = int_tensor(p.batch.kv_lens);
    add_sinks(random, p);
    add_head_scales(random, p);
    CHECK(Plan::create(p.options, &plan).ok());
    CHECK(plan.plan(p.batch_view()).ok());
    out = Outputs(p);
    workspace = Workspace(plan.workspace_bytes());
  }

  AttentionTensors tensors(bool csr) {
    AttentionTensors t = tensors_of(p, out, workspace);
    t.block_table = csr ? TensorView() : table.view();
    t.page_indptr = csr ? indptr.view() : TensorView();
    t.page_indices = csr ? indices.view() : TensorView();
    return t;
  }

  Problem p;
  HostTensor table, indices, indptr;
  Plan plan;
  Outputs out{p};
  Workspace workspace{0};
};

/// Moves each argument onto each output in turn; all must be refused, whichever is named.
template <class Tensors>
void check_every_pair(const std::function<Tensors()>& make,
                      const std::function<std::vector<Argument>(Tensors&)>& written,
                      const std::function<std::vector<Argument>(Tensors&)>& all,
                      const std::function<Status(const Tensors&)>& call) {
  Tensors counted = make();
  for (size_t i = 0; i < written(counted).size(); ++i) {
    for (size_t j = 0; j < all(counted).size(); ++j) {
      Tensors t = make();
      const auto [name, output] = written(t)[i];
      const auto [other_name, other] = all(t)[j];
      if (output == other || other->empty()) continue;
      other->data = output->data;
      const Status status = call(t);
      const std::string message = status.message;
      const auto text = [](const char* a, const char* b) {
        return std::string(a) + ": expected memory apart from " + b + ", got an overlap";
      };
      CHECK(status.code == StatusCode::kInvalidArgument);
      if (message != text(name, other_name) && message != text(other_name, name)) {
        check::fail(__FILE__, __LINE__, std::string(name) + ", " + other_name + ": " + message);
      }
    }
  }
}

TEST(run_refuses_every_overlap_with_an_output) {
  Scene s;
  const Outputs untouched = s.out;
  for (const bool csr : {false, true}) {
    check_every_pair<AttentionTensors>(
        [&] { return s.tensors(csr); },
        [](AttentionTensors& t) { return std::vector<Argument>{{"out", &t.o}, {"lse", &t.lse}}; },
        [](AttentionTensors& t) {
          return std::vector<Argument>{{"out", &t.o},
                                       {"lse", &t.lse},
                                       {"q", &t.q},
                                       {"k", &t.k},
                                       {"v", &t.v},
                                       {"block_table", &t.block_table},
                                       {"page_indptr", &t.page_indptr},
                                       {"page_indices", &t.page_indices},
                                       {"kv_lens", &t.kv_lens},
                                       {"sinks", &t.sinks},
                                       {"k_scale", &t.k_scales},
                                       {"v_scale", &t.v_scales}};
        },
        [&](const AttentionTensors& t) {
          const Status status = s.plan.run(t);
          CHECK(s.out == untouched);
          return status;
        });
    AttentionTensors t = s.tensors(csr);
    CHECK_EQ(s.plan.run(t).message, std::string());
    CHECK_EMPTY(wrong_output(s.p, s.out));
    s.out = untouched;
  }
}

TEST(run_refuses_overlaps_with_the_workspace) {
  Scene s;
  const auto overlapping = [](const char* name) {
    return "memory apart from " + std::string(name) + ", got an overlap";
  };
  for (const char* name : {"out", "lse", "q", "k", "v", "block_table"}) {
    AttentionTensors t = s.tensors(false);
    for (const auto& [argument, view] :
         {Argument{"out", &t.o}, Argument{"lse", &t.lse}, Argument{"q", &t.q}, Argument{"k", &t.k},
          Argument{"v", &t.v}, Argument{"block_table", &t.block_table}}) {
      if (std::string(argument) == name) view->data = s.workspace.data();
    }
    const std::string message = s.plan.run(t).message;
    CHECK(message.rfind(std::string(name) + ": expected " + overlapping("workspace"), 0) == 0 ||
          message.rfind("workspace: expected " + overlapping(name), 0) == 0);
  }
}

TEST(run_refuses_outputs_whose_elements_overlap) {
  Scene s;
  for (const bool is_lse : {false, true}) {
    AttentionTensors t = s.tensors(false);
    TensorView& view = is_lse ? t.lse : t.o;
    view.stride[0] = view.stride[1] = is_lse ? 1 : 4;
    check_refused(s.plan.run(t), StatusCode::kInvalidArgument, is_lse ? "lse" : "out");
  }
}

TEST(an_lse_that_is_not_given_is_not_written) {
  Scene s;
  AttentionTensors t = s.tensors(false);
  const std::vector<std::byte> before = s.out.lse.bytes();
  t.lse.rank = 0;  // with `data` set
  CHECK_EQ(s.plan.run(t).message, std::string());
  CHECK(s.out.lse.bytes() == before);
}

TEST(a_workspace_in_use_is_refused) {
  Scene s;
  AttentionTensors t = s.tensors(false);
  const Outputs untouched = s.out;
  {
    const WorkspaceClaim of_another_run(static_cast<std::byte*>(t.workspace) + 8, 1);
    check_refused(s.plan.run(t), StatusCode::kNotReady, "workspace");
    CHECK(s.out == untouched);
  }
  CHECK_EQ(s.plan.run(t).message, std::string());
  CHECK_EMPTY(wrong_output(s.p, s.out));
}

// The tensors of an append to the cache of a scene.
struct Append {
  Append() : k(DType::kFloat32, {3, 2, 8}), v(DType::kFloat32, {3, 2, 8}) {
    indptr = int_tensor({0, 2, 3});
    kv_lens = int_tensor({9, 6});
    for (HostTensor* scales : {&k_scales, &v_scales}) {
      for (int64_t head = 0; head < 2; ++head) scales->set({head}, 1.0);
    }
  }
  AppendTensors tensors(bool csr) {
    AppendTensors t;
    t.k = k.view();
    t.v = v.view();
    t.k_cache = s.p.k.view();
    t.v_cache = s.p.v.view();
    t.indptr = indptr.view();
    t.kv_lens = kv_lens.view();
    t.block_table = csr ? TensorView() : s.table.view();
    t.page_indptr = csr ? s.indptr.view() : TensorView();
    t.page_indices = csr ? s.indices.view() : TensorView();
    t.layout = s.p.options.kv_layout;
    t.k_scales = k_scales.view();
    t.v_scales = v_scales.view();
    return t;
  }

  Scene s;
  HostTensor k, v, indptr, kv_lens;
  HostTensor k_scales{DType::kFloat32, {2}}, v_scales{DType::kFloat32, {2}};
};

TEST(append_refuses_every_overlap_with_a_cache) {
  Append a;
  const auto caches = [](AppendTensors& t) {
    return std::vector<Argument>{{"k_cache", &t.k_cache}, {"v_cache", &t.v_cache}};
  };
  for (const bool csr : {false, true}) {
    check_every_pair<AppendTensors>(
        [&] { return a.tensors(csr); }, caches,
        [&](AppendTensors& t) {
          std::vector<Argument> all = caches(t);
          for (const Argument& argument :
               {Argument{"k", &t.k}, Argument{"v", &t.v}, Argument{"indptr", &t.indptr},
                Argument{"kv_lens", &t.kv_lens}, Argument{"block_table", &t.block_table},
                Argument{"page_indptr", &t.page_indptr}, Argument{"page_indices", &t.page_indices},
                Argument{"k_scale", &t.k_scales}, Argument{"v_scale", &t.v_scales}}) {
            all.push_back(argument);
          }
          return all;
        },
        [](const AppendTensors& t) { return append_paged_kv(t); });
    CHECK_EQ(append_paged_kv(a.tensors(csr)).message, std::string());
  }
}

TEST(rope_append_refuses_every_overlap_with_what_it_writes) {
  struct Arguments {
    AppendTensors t;
    TensorView q, out_q;
  };
  Append a;
  const HostTensor q(DType::kFloat32, {3, 4, 8});
  const HostTensor out_q(DType::kFloat32, {3, 4, 8}, 3);  // so that it never lies as q
  const auto written = [](Arguments& all) {
    return std::vector<Argument>{
        {"k_cache", &all.t.k_cache}, {"v_cache", &all.t.v_cache}, {"out_q", &all.out_q}};
  };
  check_every_pair<Arguments>(
      [&] { return Arguments{a.tensors(false), q.view(), out_q.view()}; }, written,
      [&](Arguments& all) {
        std::vector<Argument> arguments = written(all);
        for (const Argument& argument :
             {Argument{"q", &all.q}, Argument{"k", &all.t.k}, Argument{"v", &all.t.v},
              Argument{"indptr", &all.t.indptr}, Argument{"kv_lens", &all.t.kv_lens},
              Argument{"block_table", &all.t.block_table}, Argument{"k_scale", &all.t.k_scales},
              Argument{"v_scale", &all.t.v_scales}}) {
          arguments.push_back(argument);
        }
        return arguments;
      },
      [](const Arguments& all) { return rope_append_paged_kv(all.q, all.t, {}, all.out_q); });
}

TEST(append_refuses_what_would_be_read_unchecked) {
  struct Bad {
    const char* argument;
    std::function<void(AppendTensors&)> change;
    StatusCode code = StatusCode::kInvalidArgument;
  };
  const auto type = StatusCode::kInvalidType;
  const std::vector<Bad> all = {
      {"k_cache", [](auto& t) { t.k.dtype = t.k_cache.dtype = DType::kInt32; }, type},
      {"k_cache", [](auto& t) { t.k.dtype = t.k_cache.dtype = static_cast<DType>(77); }, type},
      {"k", [](auto& t) { t.k_cache.dtype = DType::kFloat8E4M3, t.k.dtype = DType::kInt32; }, type},
      {"k",
       [](auto& t) {
         t.k_cache.dtype = DType::kFloat8E4M3;
         t.k.dtype = static_cast<DType>(77);
       },
       type},
      {"v", [](auto& t) { t.v.dtype = DType::kFloat16; }, type},
      {"k_cache",
       [](auto& t) {
         for (TensorView* view : {&t.k, &t.v, &t.k_cache, &t.v_cache}) {
           view->device.type = static_cast<DeviceType>(7);
         }
       },
       type},
      {"k_cache",
       [](auto& t) {
         for (TensorView* view : {&t.k, &t.v, &t.k_cache, &t.v_cache}) view->device.index = 9;
       },
       type},
      {"kv_layout", [](auto& t) { t.layout = static_cast<KvLayout>(7); }},
      {"k_cache", [](auto& t) { t.k_cache.shape[1] = t.v_cache.shape[1] = int64_t{1} << 32; }},
      {"k_cache", [](auto& t) { t.k_cache.shape[1] = t.v_cache.shape[1] = int64_t{1} << 31; }},
      {"k_cache", [](auto& t) { t.k_cache.stride[1] = 8; }},
      {"v_cache", [](auto& t) { t.v_cache.stride[2] = 4; }},
      {"kv_lens", [](auto& t) { t.kv_lens.shape[0] = int64_t{1} << 32; }},
      {"indptr", [](auto& t) { t.indptr.shape[0] = 2; }},
      {"indptr", [](auto& t) { t.indptr.data = nullptr; }},
      {"block_table", [](auto& t) { t.block_table.data = nullptr; }},
      // Pages that one of the caches has not: ids go up to 7.
      {"block_table[0, ", [](auto& t) { t.v_cache.shape[0] = 1; }},
      {"block_table[0, ", [](auto& t) { t.k_cache.shape[0] = 1; }},
  };
  Append a;
  const std::vector<std::byte> k_before = a.s.p.k.bytes();
  const std::vector<std::byte> v_before = a.s.p.v.bytes();
  for (const Bad& bad : all) {
    AppendTensors t = a.tensors(false);
    bad.change(t);
    const Status status = append_paged_kv(t);
    const std::string message = status.message;
    CHECK(status.code == bad.code);
    if (message.rfind(bad.argument, 0) != 0) {
      check::fail(__FILE__, __LINE__, std::string(bad.argument) + ": " + message);
    }
    CHECK(a.s.p.k.bytes() == k_before);
    CHECK(a.s.p.v.bytes() == v_before);
  }
}

TEST(merge_refuses_overlaps_and_ranks) {
  HostTensor o_a(DType::kFloat32, {4, 4, 8}), o_b(DType::kFloat32, {4, 4, 8});
  HostTensor lse_a(DType::kFloat32, {4, 4}), lse_b(DType::kFloat32, {4, 4});
  HostTensor o(DType::kFloat32, {4, 4, 8}), lse(DType::kFloat32, {4, 4});
  const AttentionState states[] = {{o_a.view(), lse_a.view()}, {o_b.view(), lse_b.view()}};
  const AttentionState good = {o.view(), lse.view()};
  struct Bad {
    const char* argument;
    std::function<void(AttentionState&)> change;
    StatusCode code = StatusCode::kInvalidArgument;
  };
  const std::vector<Bad> all = {
      {"out", [](auto& out) { out.o.rank = 5; }},
      {"out", [](auto& out) { out.o.rank = 1000; }},
      {"lse", [](auto& out) { out.lse.rank = 0; }},
      {"lse", [](auto& out) { out.lse.rank = 7; }},
      {"out", [](auto& out) { out.o.stride[0] = 8; }},
      {"lse", [](auto& out) { out.lse.stride[0] = 2; }},
      {"lse", [&](auto& out) { out.lse.data = o_a.view().data; }},
      {"lse", [&](auto& out) { out.lse.data = o_b.view().data; }},
      {"out", [&](auto& out) { out.o.data = lse_b.view().data; }},
      {"out", [](auto& out) { out.lse.data = out.o.data; }},
      // An input's memory with its heads and tokens exchanged.
      {"out",
       [&](auto& out) {
         out.o.data = o_b.view().data;
         std::swap(out.o.stride[0], out.o.stride[1]);
       }},
      {"lse",
       [&](auto& out) {
         out.lse = lse_a.view();
         out.lse.data = static_cast<float*>(out.lse.data) + 4;
       }},
  };
  const std::vector<std::byte> untouched = o.bytes();
  for (const Bad& bad : all) {
    AttentionState out = good;
    bad.change(out);
    check_refused(merge_states(states, 2, out), bad.code, bad.argument);
    CHECK(o.bytes() == untouched);
  }
  AttentionState elsewhere[] = {states[0], states[1]};
  for (AttentionState& state : elsewhere) state.o.device.type = static_cast<DeviceType>(7);
  check_refused(merge_states(elsewhere, 2, good), StatusCode::kInvalidType, "o[0]");
  CHECK_EQ(merge_states(states, 2, good).message, std::string());
  CHECK_EQ(merge_states(states, 2, states[1]).message, std::string());
}

}  // namespace
}  // namespace flashplan::test
