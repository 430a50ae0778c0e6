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
#include "random_batch.h"
#include "run_schedule.h"
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

/// A number, mostly a small one.
int32_t any_length(FuzzedDataProvider& in, int32_t small) {
  return in.ConsumeIntegral<uint8_t>() < 250 ? in.ConsumeIntegralInRange<int32_t>(0, small)
                                             : in.ConsumeIntegral<int32_t>();
}

struct Lengths {
  std::vector<int32_t> qo_indptr, kv_lens, kv_indptr, shared_prefixes;

  Batch view() const {
    return {qo_indptr.data(),
            kv_lens.data(),
            kv_indptr.empty() ? nullptr : kv_indptr.data(),
            static_cast<int32_t>(kv_lens.size()),
            shared_prefixes.data(),
            static_cast<int32_t>(shared_prefixes.size() / 3)};
  }
};

/// Any rows, or a valid forest of prefixes.
void add_prefixes(FuzzedDataProvider& in, Lengths& lengths) {
  const auto size = static_cast<int32_t>(lengths.kv_lens.size());
  const auto fits = [](int32_t length) { return length >= 0 && length < 100000; };
  const bool is_sane = std::is_sorted(lengths.qo_indptr.begin(), lengths.qo_indptr.end()) &&
                       lengths.qo_indptr.front() == 0 && fits(lengths.qo_indptr.back()) &&
                       std::all_of(lengths.kv_lens.begin(), lengths.kv_lens.end(), fits);
  if (is_sane && size > 0 && lengths.kv_indptr.empty() && in.ConsumeBool()) {
    HostBatch batch;
    batch.qo_indptr = lengths.qo_indptr;
    batch.kv_lens = lengths.kv_lens;
    Random random(in.ConsumeIntegral<uint32_t>());
    share_randomly(random, in.PickValueInArray({10, 300, 5000}), &batch);
    lengths.kv_lens = batch.kv_lens;
    lengths.shared_prefixes = batch.shared_prefixes;
    return;
  }
  for (int32_t count = in.ConsumeIntegralInRange<int32_t>(0, 5); count > 0; --count) {
    for (int column = 0; column < 3; ++column) {
      lengths.shared_prefixes.push_back(any_length(in, std::max(size, 1)));
    }
  }
}

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
  if (in.ConsumeBool()) add_prefixes(in, lengths);
  return lengths;
}

/// The rules of plan.h for the shared prefixes of an otherwise valid batch, checked pair by pair.
bool has_valid_prefixes(const AttentionOptions& options, const Lengths& l) {
  const auto size = static_cast<int64_t>(l.kv_lens.size());
  const auto& rows = l.shared_prefixes;
  if (static_cast<int64_t>(rows.size()) > 6 * int64_t{options.max_batch_size}) return false;
  for (size_t i = 0; i < rows.size(); i += 3) {
    const int64_t begin = rows[i];
    const int64_t end = begin + rows[i + 1];
    if (begin < 0 || end <= begin || end > size || rows[i + 2] < 0) return false;
    for (auto r = static_cast<size_t>(begin); r < static_cast<size_t>(end); ++r) {
      const int64_t most = int64_t{l.kv_lens[r]} - (l.qo_indptr[r + 1] - l.qo_indptr[r]);
      if (rows[i + 2] > std::max<int64_t>(most, 0)) return false;
    }
    for (size_t j = 0; j < i; j += 3) {
      const int64_t other = rows[j];
      const int64_t other_end = other + rows[j + 1];
      const bool apart = end <= other || other_end <= begin;
      const bool inside =
          (other <= begin && end <= other_end) || (begin <= other && other_end <= end);
      if (!apart && !inside) return false;
    }
  }
  return true;
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
  if (!has_valid_prefixes(options, l)) return false;
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
  s.shares_prefixes = s.mask.window_left < 0 && in.ConsumeBool();
  s.max_partial_slots = 2 * s.num_ctas;
  if (in.ConsumeBool()) s.max_partial_slots = in.ConsumeIntegralInRange<int32_t>(0, 3000);
  if (!s.shares_prefixes && in.ConsumeBool()) {
    s.chunk_kv = s.tile_kv << in.ConsumeIntegralInRange<int32_t>(0, 4);
  }
  if (in.ConsumeBool()) s.item_steps = in.ConsumeIntegralInRange<int32_t>(1, 100);
  s.cost.tile = in.ConsumeIntegralInRange<int32_t>(0, 1000);
  s.cost.tile_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  s.cost.step = in.ConsumeIntegralInRange<int32_t>(1, 1000);
  s.cost.step_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  s.cost.split = in.ConsumeIntegralInRange<int32_t>(0, 1000);
  s.cost.split_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  s.cost.write = in.ConsumeIntegralInRange<int32_t>(0, 500);
  s.cost.write_row = in.ConsumeIntegralInRange<int32_t>(0, 20);
  s.cost.merge = in.ConsumeIntegralInRange<int32_t>(0, 1000);
  s.cost.cached = in.ConsumeIntegralInRange<int32_t>(0, 500);
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
    const std::string violation = schedule.prefixes.empty()
                                      ? schedule_violation(schedule, lengths.view(), shape, bounds)
                                      : ScheduleRun(schedule, lengths.view(), shape).violation(0);
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
