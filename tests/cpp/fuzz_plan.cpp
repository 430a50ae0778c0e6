// SPDX-License-Identifier: Apache-2.0
// libFuzzer target. Any lengths must give a Status that agrees with the header's rules, and every
// schedule must keep its invariants and come near the slow planner's makespan.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "flashplan/plan.h"
#include "owning_scheduler.h"
#include "plan/schedule.h"
#include "schedule_invariants.h"
#include "slow_planner.h"

namespace flashplan::test {
namespace {

constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_plan: %s\n", what.c_str());
  std::abort();
}

/// Mostly small, sometimes anything.
int32_t any_length(FuzzedDataProvider& in, int32_t small) {
  return in.ConsumeIntegral<uint8_t>() < 250 ? in.ConsumeIntegralInRange<int32_t>(0, small)
                                             : in.ConsumeIntegral<int32_t>();
}

struct Lengths {
  std::vector<int32_t> qo_indptr, kv_lens, kv_indptr;

  Batch view() const {
    return {qo_indptr.data(), kv_lens.data(), kv_indptr.empty() ? nullptr : kv_indptr.data(),
            static_cast<int32_t>(kv_lens.size())};
  }
};

Lengths any_lengths(FuzzedDataProvider& in) {
  Lengths lengths;
  const auto wrapping_add = [](int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  };
  const int32_t size = in.ConsumeIntegralInRange<int32_t>(0, 40);
  const int32_t max_qo_len = in.PickValueInArray({1, 8, 100});
  const int32_t max_kv_len = in.PickValueInArray({10, 300, 10000, kMaxInt});
  const bool has_kv_indptr = in.ConsumeBool();
  lengths.qo_indptr = {any_length(in, 0)};
  if (has_kv_indptr) lengths.kv_indptr = {any_length(in, 5)};
  for (int32_t r = 0; r < size; ++r) {
    lengths.qo_indptr.push_back(wrapping_add(lengths.qo_indptr.back(), any_length(in, max_qo_len)));
    lengths.kv_lens.push_back(any_length(in, max_kv_len));
    if (!has_kv_indptr) continue;
    const int32_t gap = any_length(in, 3);
    lengths.kv_indptr.push_back(
        wrapping_add(lengths.kv_indptr.back(), wrapping_add(lengths.kv_lens.back(), gap)));
  }
  return lengths;
}

/// The rules of plan.h.
bool is_valid(const AttentionOptions& options, const Lengths& l) {
  const size_t size = l.kv_lens.size();
  int64_t num_keys = 0;
  if (static_cast<int64_t>(size) > options.max_batch_size || l.qo_indptr[0] != 0) return false;
  for (size_t r = 0; r < size; ++r) {
    if (l.qo_indptr[r + 1] < l.qo_indptr[r] || l.kv_lens[r] < 0) return false;
    num_keys += l.kv_lens[r];
  }
  if (l.qo_indptr.back() > options.max_qo_tokens) return false;
  if (options.page_size > 0) return l.kv_indptr.empty();
  if (l.kv_indptr.empty()) return num_keys <= kMaxInt;
  for (size_t r = 0; r < size; ++r) {
    if (int64_t{l.kv_indptr[r + 1]} - l.kv_indptr[r] < l.kv_lens[r]) return false;
  }
  return l.kv_indptr[0] >= 0;
}

AttentionOptions any_options(FuzzedDataProvider& in) {
  AttentionOptions o;
  o.num_kv_heads = in.ConsumeIntegralInRange<int32_t>(1, 8);
  o.num_qo_heads = o.num_kv_heads * in.ConsumeIntegralInRange<int32_t>(1, 9);
  o.head_dim_qk = in.PickValueInArray({1, 64, 128});
  o.head_dim_vo = in.PickValueInArray({1, 64, 128});
  o.page_size = in.PickValueInArray({0, 1, 16, kMaxInt});
  o.causal = in.ConsumeBool();
  o.window_left = in.ConsumeBool() ? any_length(in, 500) : -1;
  o.max_batch_size = any_length(in, 40);
  o.max_qo_tokens = in.ConsumeIntegralInRange<int32_t>(0, 500);
  o.num_ctas = in.ConsumeIntegralInRange<int32_t>(0, 264);
  o.batch_invariant = in.ConsumeBool();
  if (in.ConsumeBool()) o.workspace_bytes = in.ConsumeIntegralInRange<size_t>(0, 1 << 26);
  // A length that select_kernel allows may still be more memory than a fuzzer has.
  if (o.max_batch_size > 1000 && o.max_batch_size <= 1 << 20) o.max_batch_size = 1000;
  return o;
}

void plan_anything(FuzzedDataProvider& in) {
  const AttentionOptions options = any_options(in);
  Plan plan;
  const Status created = Plan::create(options, &plan);
  require(created.ok() == (created.message[0] == '\0'), "a refusal says why");
  if (!created.ok()) return;
  for (int i = 0; i < 2; ++i) {
    const Lengths lengths = any_lengths(in);
    const Status status = plan.plan(lengths.view());
    require(status.ok() == is_valid(options, lengths),
            std::string("plan() and the rules disagree: ") + status.message);
    require(status.ok() == (status.message[0] == '\0'), "a refusal says why");
    require(!plan.describe().empty(), "describe() is empty");
    plan.timeline_svg();
  }
}

ScheduleShape any_shape(FuzzedDataProvider& in) {
  ScheduleShape s;
  s.num_kv_heads = in.ConsumeIntegralInRange<int32_t>(1, 32);
  s.group_size = in.ConsumeIntegralInRange<int32_t>(1, 9);
  s.mask.causal = in.ConsumeBool();
  s.mask.window_left = in.ConsumeBool() ? in.ConsumeIntegralInRange<int32_t>(0, 2000) : -1;
  s.tile_q = 1 << in.ConsumeIntegralInRange<int32_t>(2, 7);
  s.tile_kv = 1 << in.ConsumeIntegralInRange<int32_t>(3, 7);
  s.num_ctas = in.ConsumeIntegralInRange<int32_t>(1, 264);
  s.max_partial_slots = 2 * s.num_ctas;
  if (in.ConsumeBool()) s.max_partial_slots = in.ConsumeIntegralInRange<int32_t>(0, 3000);
  if (in.ConsumeBool()) s.chunk_kv = s.tile_kv << in.ConsumeIntegralInRange<int32_t>(0, 4);
  if (in.ConsumeBool()) s.item_steps = in.ConsumeIntegralInRange<int32_t>(1, 100);
  s.cost.tile = in.ConsumeIntegralInRange<int32_t>(0, 1000);
  s.cost.tile_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  s.cost.step = in.ConsumeIntegralInRange<int32_t>(1, 1000);
  s.cost.step_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  s.cost.split = in.ConsumeIntegralInRange<int32_t>(0, 1000);
  s.cost.split_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  return s;
}

void schedule_anything(FuzzedDataProvider& in) {
  const ScheduleShape shape = any_shape(in);
  AttentionOptions limits;
  limits.max_qo_tokens = 2000;
  OwningScheduler scheduler(shape, limits.max_batch_size, limits.max_qo_tokens);
  const ScheduleBounds bounds = schedule_bounds(shape, limits.max_batch_size, limits.max_qo_tokens);
  for (int i = 0; i < 2; ++i) {
    const Lengths lengths = any_lengths(in);
    if (!is_valid(limits, lengths)) return;
    scheduler.make(lengths.view());
    const Schedule& schedule = scheduler.schedule();
    const std::string violation = schedule_violation(schedule, lengths.view(), shape, bounds);
    require(violation.empty(), violation);
    if (shape.chunk_kv > 0 || shape.max_partial_slots < 2 * shape.num_ctas) continue;
    const int64_t slow = slow_makespan(shape, lengths.view());
    const int64_t fast = *std::max_element(schedule.cta_cost.begin(), schedule.cta_cost.end());
    require(fast <= acceptable_makespan(shape, slow),
            "makespan " + std::to_string(fast) + ", Algorithm 1's " + std::to_string(slow));
  }
}

}  // namespace
}  // namespace flashplan::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider in(data, size);
  if (in.ConsumeBool()) {
    flashplan::test::plan_anything(in);
  } else {
    flashplan::test::schedule_anything(in);
  }
  return 0;
}
