// SPDX-License-Identifier: Apache-2.0
// The engine through the public API: small random problems on the CPU against a double loop.
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "allocations.h"
#include "check.h"
#include "flashplan/flashplan.h"
#include "problem.h"

namespace flashplan::test {
namespace {

Problem small_problem(Random& random, int32_t max_kv_len = 130) {
  Problem p = random_problem(random);
  const int32_t batch_size = random.between(0, 5);
  for (int32_t r = 0; r < batch_size; ++r) {
    const int32_t qo_len = random.one_in(2) ? 1 : random.between(0, 30);
    p.batch.add(qo_len, random.one_in(8) ? 0 : random.between(1, max_kv_len));
  }
  if (random.one_in(3)) plan_upper_bounds(random, p, random.pick({1, 40, 200}));
  if (random.one_in(3)) add_mask(random, p);
  if (random.one_in(3)) add_sinks(random, p);
  if (random.one_in(3)) add_head_scales(random, p);
  fill_problem(random, p);
  return p;
}

/// One request long enough to be cut, and a few short ones.
Problem long_problem(Random& random, bool batch_invariant) {
  Problem p = random_problem(random);
  p.options.num_kv_heads = 1;
  p.options.num_qo_heads = 4;
  p.options.head_dim_qk = p.options.head_dim_vo = 8;
  p.options.window_left = -1;
  p.options.num_ctas = 13;
  p.options.batch_invariant = batch_invariant;
  if (random.one_in(2)) add_sinks(random, p);
  if (random.one_in(2)) add_head_scales(random, p);
  p.batch.add(1, 30);
  p.batch.add(2, 5000);
  p.batch.add(3, 100);
  fill_problem(random, p);
  return p;
}

TEST(small_problems) {
  Random random(1);
  for (int i = 0; i < 400; ++i) {
    const Problem p = small_problem(random);
    Outputs out(p, random.pick({0, 4}));
    CHECK_EMPTY(run_problem(p, out));
    const std::string wrong = wrong_output(p, out);
    if (!wrong.empty())
      check::fail(__FILE__, __LINE__, "round " + std::to_string(i) + ": " + wrong);
  }
}

/// Of a 16- or 32-bit float.
uint32_t infinity_bits(DType dtype) {
  if (dtype == DType::kFloat32) return 0x7f800000U;
  return dtype == DType::kFloat16 ? 0x7c00U : 0x7f80U;
}

/// NaN of all bits, or infinity, in an element of q, of k and of v, or of some of them.
void plant(Random& random, Problem& p) {
  const auto place = [&](HostTensor& tensor, const Index& index) {
    if (random.one_in(2)) return;
    if (random.one_in(3) && item_size(tensor.view().dtype) > 1) {
      const DType dtype = tensor.view().dtype;
      const uint32_t sign = random.one_in(2) ? 1U << (item_size(dtype) * 8 - 1) : 0;
      tensor.set_bits(index, infinity_bits(dtype) | sign);
    } else {
      tensor.set_bits(index, 0xffffffffU);
    }
  };
  const AttentionOptions& o = p.options;
  for (int32_t r = 0; r < p.batch.size(); ++r) {
    const int32_t kv_len = p.batch.kv_lens[static_cast<size_t>(r)];
    if (p.batch.qo_len(r) == 0 || kv_len == 0) continue;
    const int32_t query = p.batch.qo_indptr[static_cast<size_t>(r)];
    place(p.q, {query + random.between(0, p.batch.qo_len(r) - 1),
                random.between(0, o.num_qo_heads - 1), random.between(0, o.head_dim_qk - 1)});
    const int64_t key = random.between(0, kv_len - 1);
    const int64_t head = random.between(0, o.num_kv_heads - 1);
    place(p.k, kv_index(p, r, key, head, random.between(0, o.head_dim_qk - 1)));
    place(p.v, kv_index(p, r, random.between(0, kv_len - 1), head,
                        random.between(0, o.head_dim_vo - 1)));
  }
}

TEST(nan_and_infinity) {
  Random random(7);
  for (int i = 0; i < 300; ++i) {
    Problem p = i % 10 == 0 ? long_problem(random, i % 20 == 0) : small_problem(random);
    plant(random, p);
    Outputs out(p);
    CHECK_EMPTY(run_problem(p, out));
    const std::string wrong = wrong_output(p, out);
    if (!wrong.empty())
      check::fail(__FILE__, __LINE__, "round " + std::to_string(i) + ": " + wrong);
  }
}

TEST(split_requests) {
  Random random(2);
  for (int i = 0; i < 12; ++i) {
    const Problem p = long_problem(random, i % 2 == 1);
    Plan plan;
    CHECK(Plan::create(p.options, &plan).ok());
    CHECK(plan.plan(p.batch_view()).ok());
    CHECK(plan.schedule().num_partial_rows >= 2);
    Workspace workspace(plan.workspace_bytes());
    Outputs out(p);
    CHECK(plan.run(tensors_of(p, out, workspace)).ok());
    CHECK_EMPTY(wrong_output(p, out));
    // A second run in a used workspace, and in another one, gives the same bits.
    for (Workspace other(plan.workspace_bytes()); Workspace* used : {&workspace, &other}) {
      Outputs again(p);
      CHECK(plan.run(tensors_of(p, again, *used)).ok());
      CHECK(out == again);
    }
  }
}

TEST(less_workspace_means_fewer_splits) {
  Random random(3);
  Problem p = long_problem(random, false);
  Plan plan;
  CHECK(Plan::create(p.options, &plan).ok());
  const std::size_t wanted = plan.workspace_bytes();
  std::size_t given = wanted;
  // Until it is refused: at every size the answer is right.
  for (; given > 256; given -= 256) {
    p.options.workspace_bytes = given;
    if (!Plan::create(p.options, &plan).ok()) break;
    CHECK(plan.workspace_bytes() <= given);
    if (given % 2048 != 0) continue;
    Outputs out(p);
    CHECK_EMPTY(run_problem(p, out));
    CHECK_EMPTY(wrong_output(p, out));
  }
  CHECK(given < wanted);
}

TEST(batch_invariance) {
  Random random(4);
  for (int i = 0; i < 10; ++i) {
    Problem p = long_problem(random, true);
    Outputs together(p);
    CHECK_EMPTY(run_problem(p, together));
    for (const int32_t num_ctas : {1, 3, 40}) {
      Problem alone = p;
      alone.options.num_ctas = num_ctas;
      alone.options.max_batch_size = 1;
      const int32_t first = p.batch.qo_indptr[1];
      const int32_t qo_len = p.batch.qo_len(1);
      alone.batch = HostBatch();
      alone.batch.add(qo_len, p.batch.kv_lens[1]);
      // The same K and V, where the request has them.
      if (p.options.page_size == 0)
        alone.kv_indptr = {static_cast<int32_t>(p.kv_begin(1)),
                           static_cast<int32_t>(p.kv_begin(1)) + p.batch.kv_lens[1]};
      if (p.options.page_size > 0) {
        alone.pages = {p.pages[1]};
        alone.block_table = HostTensor();
        alone.page_indptr = int_tensor({0, static_cast<int32_t>(p.pages[1].size())});
        alone.page_indices = int_tensor(p.pages[1]);
      }
      for (int32_t token = 0; token < qo_len; ++token) {
        for (int32_t head = 0; head < p.options.num_qo_heads; ++head) {
          for (int32_t d = 0; d < p.options.head_dim_qk; ++d) {
            alone.q.set_bits({token, head, d}, p.q.bits({first + token, head, d}));
          }
        }
      }
      Outputs out(alone);
      CHECK_EMPTY(run_problem(alone, out));
      for (int32_t token = 0; token < qo_len; ++token) {
        for (int32_t head = 0; head < p.options.num_qo_heads; ++head) {
          CHECK_EQ(out.lse.bits({token, head}), together.lse.bits({first + token, head}));
          for (int32_t d = 0; d < p.options.head_dim_vo; ++d) {
            CHECK_EQ(out.o.bits({token, head, d}), together.o.bits({first + token, head, d}));
          }
        }
      }
    }
  }
}

TEST(real_lengths_from_the_device) {
  Random random(9);
  int num_cut = 0;
  for (int i = 0; i < 40; ++i) {
    Problem p = random_problem(random);
    p.options.head_dim_qk = p.options.head_dim_vo = 8;
    p.options.num_ctas = 13;
    p.options.batch_invariant = i % 2 == 1;
    p.options.window_left = i % 4 >= 2 ? random.between(0, 2500) : -1;
    p.batch.add(random.between(1, 40), random.between(0, 3000));
    p.batch.add(random.between(1, 3), random.between(0, 3000));
    plan_upper_bounds(random, p, 1500);
    if (random.one_in(3)) add_mask(random, p);
    if (random.one_in(3)) add_sinks(random, p);
    if (random.one_in(3)) add_head_scales(random, p);
    fill_problem(random, p);
    Outputs out(p);
    CHECK_EMPTY(run_problem(p, out));
    const std::string wrong = wrong_output(p, out);
    if (!wrong.empty())
      check::fail(__FILE__, __LINE__, "round " + std::to_string(i) + ": " + wrong);

    Plan plan;
    CHECK(Plan::create(p.options, &plan).ok());
    CHECK(plan.plan(p.batch_view()).ok());
    num_cut += plan.schedule().num_partial_rows > 0;
    if (!p.options.batch_invariant) continue;
    // The same bits as of a plan with these lengths.
    Problem exact = p;
    if (p.options.page_size == 0) exact.kv_indptr.assign({0, 0, 0});
    for (int32_t r = 0; r < 3 && p.options.page_size == 0; ++r) {
      exact.kv_indptr[static_cast<size_t>(r)] = static_cast<int32_t>(p.kv_begin(r));
    }
    exact.planned_lens.clear();
    exact.kv_lens = HostTensor();
    Outputs of_exact(exact);
    CHECK_EMPTY(run_problem(exact, of_exact));
    CHECK(out == of_exact);
  }
  CHECK(num_cut > 20);
}

TEST(results_do_not_depend_on_the_number_of_threads) {
  Random random(5);
  const int32_t before = num_threads();
  for (int i = 0; i < 10; ++i) {
    const Problem p = long_problem(random, false);
    Outputs one(p);
    CHECK(set_num_threads(1).ok());
    CHECK_EMPTY(run_problem(p, one));
    for (const int32_t threads : {2, 5}) {
      Outputs many(p);
      CHECK(set_num_threads(threads).ok());
      CHECK_EQ(num_threads(), threads);
      CHECK_EMPTY(run_problem(p, many));
      CHECK(one == many);
    }
  }
  CHECK(set_num_threads(before).ok());
}

TEST(a_step_does_not_allocate) {
  Random random(8);
  const Problem p = long_problem(random, false);
  Plan plan;
  CHECK(Plan::create(p.options, &plan).ok());
  Workspace workspace(plan.workspace_bytes());
  Outputs out(p);
  const AttentionTensors tensors = tensors_of(p, out, workspace);
  CHECK(plan.plan(p.batch_view()).ok());
  CHECK(plan.run(tensors).ok());  // starts the threads of the pool
  const int64_t before = num_allocations;
  for (int i = 0; i < 3; ++i) {
    CHECK(plan.plan(p.batch_view()).ok());
    CHECK(plan.run(tensors).ok());
  }
  CHECK_EQ(before, num_allocations);
}

TEST(plans_on_several_threads) {
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t] {
      Random random(100 + static_cast<uint64_t>(t));
      const Problem p = long_problem(random, t % 2 == 0);
      Outputs first(p);
      CHECK_EMPTY(run_problem(p, first));
      CHECK_EMPTY(wrong_output(p, first));
      for (int i = 0; i < 20; ++i) {
        Outputs out(p);
        CHECK_EMPTY(run_problem(p, out));
        CHECK(out == first);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(one_plan_from_two_threads) {
  Random random(6);
  const Problem p = long_problem(random, false);
  Outputs want(p);
  CHECK_EMPTY(run_problem(p, want));
  Plan plan;
  CHECK(Plan::create(p.options, &plan).ok());
  std::atomic<int> refused{0};
  std::atomic<int> done{0};
  const auto use = [&] {
    Workspace workspace(plan.workspace_bytes());
    // A round is one plan() and one run(); either may find the other thread at work.
    for (int i = 0; i < 2000 && (done < 20 || refused == 0); ++i) {
      const Status planned = plan.plan(p.batch_view());
      CHECK(planned.ok() || planned.code == StatusCode::kNotReady);
      Outputs out(p);
      const Status ran = plan.run(tensors_of(p, out, workspace));
      CHECK(ran.ok() || ran.code == StatusCode::kNotReady);
      if (ran.ok()) CHECK(out == want);
      ++(ran.ok() ? done : refused);
    }
  };
  std::thread other(use);
  use();
  other.join();
  CHECK(done > 0);
  CHECK(refused > 0);
}

TEST(a_failed_run_writes_nothing) {
  Random random(7);
  for (int i = 0; i < 50; ++i) {
    const Problem p = small_problem(random);
    if (p.batch.qo_tokens() == 0 || p.batch.kv_lens[0] == 0) continue;
    Plan plan;
    CHECK(Plan::create(p.options, &plan).ok());
    CHECK(plan.plan(p.batch_view()).ok());
    Workspace workspace(plan.workspace_bytes());
    Outputs out(p);
    const Outputs untouched = out;
    AttentionTensors t = tensors_of(p, out, workspace);
    const AttentionTensors good = t;
    const auto fails = [&] {
      CHECK(!plan.run(t).ok());
      CHECK(out == untouched);
      t = good;
    };
    t.q.shape[0] = p.batch.qo_tokens() - 1;
    fails();
    t.v.dtype = DType::kInt32;
    fails();
    t.o.shape[1] += 1;
    fails();
    t.lse.read_only = true;
    fails();
    t.workspace_bytes -= 1;
    fails();
    t.v_scale = -1.0F;
    fails();
    if (p.options.page_size > 0) {
      t.k.shape[0] = 0;  // no page id is valid
      fails();
    }
    const int32_t bad_len = -3;
    Batch batch = p.batch.view();
    batch.batch_size = 1;
    batch.kv_lens = &bad_len;
    CHECK(!plan.plan(batch).ok());
    CHECK(plan.run(t).ok());  // the last plan stays valid
    CHECK_EMPTY(wrong_output(p, out));
  }
}

}  // namespace
}  // namespace flashplan::test
