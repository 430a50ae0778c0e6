// SPDX-License-Identifier: Apache-2.0
// Schedules of batches whose requests share prefixes.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "allocations.h"
#include "check.h"
#include "modelled_time.h"
#include "owning_scheduler.h"
#include "plan/kernel/tuning.h"
#include "plan/schedule/schedule.h"
#include "random_batch.h"
#include "run_schedule.h"

namespace flashplan::test {
namespace {

/// As on a GPU of 132 SMs, or on a CPU.
ScheduleShape real_shape(bool on_gpu, int32_t num_ctas) {
  const KernelTuning tuning = on_gpu ? sm80_tuning(64) : cpu_tuning();
  ScheduleShape shape;
  shape.num_kv_heads = 8;
  shape.group_size = 4;
  shape.paged = true;
  shape.tile_q = 128;
  shape.tile_kv = on_gpu ? 64 : 32;
  shape.num_ctas = num_ctas;
  shape.max_partial_slots = 3 * num_ctas + 256;
  shape.shares_prefixes = true;
  shape.item_steps = tuning.item_steps;
  shape.cost = tuning.cost;
  return shape;
}

ScheduleShape random_shape(Random& random) {
  if (random.one_in(3)) {
    return real_shape(random.one_in(2), random.pick({1, 2, 8, 100, 264}));
  }
  ScheduleShape shape;
  shape.num_kv_heads = random.pick({1, 2, 3, 8});
  shape.group_size = random.pick({1, 3, 4, 7, 8});
  shape.mask.causal = !random.one_in(3);
  shape.paged = random.one_in(2);
  shape.tile_q = random.pick({16, 32, 128, 192});
  shape.tile_kv = random.pick({16, 32, 64, 80});
  shape.heads_at_once = random.between(1, 2);
  shape.num_ctas = random.one_in(2) ? random.between(1, 264) : random.pick({1, 2, 3});
  shape.max_partial_slots = random.pick({0, 7, 2 * shape.num_ctas, 1000});
  shape.shares_prefixes = !random.one_in(10);
  shape.cost = random_costs(random);
  if (random.one_in(2)) shape.item_steps = random.pick({1, 8, 32, 1000});
  if (random.one_in(3)) shape.uncut_part = random.pick({1, 16});
  shape.merges_readers_last = shape.prefixes_first() && random.one_in(2);
  return shape;
}

HostBatch random_sharing_batch(Random& random) {
  HostBatch batch;
  const int32_t size = random.one_in(5) ? random.between(1, 200) : random.between(1, 30);
  const int32_t max_qo_len = random.pick({1, 1, 4, 60});
  for (int32_t r = 0; r < size; ++r) {
    const int32_t qo_len = random.one_in(9) ? 0 : random.between(1, max_qo_len);
    batch.add(qo_len, qo_len + random.between(0, random.pick({0, 100, 2000})));
  }
  share_randomly(random, random.pick({10, 1000, 5000, 20000}), &batch);
  return batch;
}

int64_t longest_queue(const Schedule& schedule) {
  return *std::max_element(schedule.cta_cost.begin(), schedule.cta_cost.end());
}

TEST(every_row_gets_every_key_once) {
  Random random(1);
  int64_t num_prefixes = 0;
  int64_t num_cut = 0;
  for (int i = 0; i < check::rounds(4000); ++i) {
    const ScheduleShape shape = random_shape(random);
    HostBatch batch = random_sharing_batch(random);
    OwningScheduler scheduler(shape, batch.size(), batch.qo_tokens());
    const int64_t before = num_allocations;
    scheduler.make(batch.view());
    CHECK_EQ(before, num_allocations);
    const Schedule& schedule = scheduler.schedule();
    const std::string wrong =
        ScheduleRun(schedule, batch.view(), shape).violation(static_cast<uint64_t>(i));
    if (!wrong.empty())
      check::fail(__FILE__, __LINE__, "round " + std::to_string(i) + ": " + wrong);
    const ScheduleBounds bounds = schedule_bounds(shape, batch.size(), batch.qo_tokens());
    CHECK(static_cast<int64_t>(schedule.segments.size()) <= bounds.segments);
    CHECK(static_cast<int64_t>(schedule.tiles.size()) <= bounds.work_tiles);
    CHECK(static_cast<int64_t>(schedule.merges.size()) <= bounds.merges);
    num_prefixes += static_cast<int64_t>(schedule.prefixes.size());
    if (!schedule.prefixes.empty()) num_cut += schedule.num_cut;

    // No queue is longer than the longest without groups, and a plan leaves nothing to the next.
    const int64_t with = longest_queue(schedule);
    const std::vector<int32_t> groups = std::exchange(batch.shared_prefixes, {});
    scheduler.make(batch.view());
    CHECK(scheduler.schedule().prefixes.empty());
    CHECK(with <= longest_queue(scheduler.schedule()));
    CHECK_EMPTY(ScheduleRun(scheduler.schedule(), batch.view(), shape).violation(0));
  }
  std::printf("  %lld prefixes computed once, %lld heads cut beside them\n",
              static_cast<long long>(num_prefixes), static_cast<long long>(num_cut));
  CHECK(num_prefixes > check::rounds(1500));
  CHECK(num_cut > check::rounds(3000));
}

double part_of_time(const ScheduleShape& shape, HostBatch batch) {
  OwningScheduler scheduler(shape, batch.size(), batch.qo_tokens());
  scheduler.make(batch.view());
  const auto with = static_cast<double>(longest_queue(scheduler.schedule()));
  batch.shared_prefixes.clear();
  scheduler.make(batch.view());
  return with / static_cast<double>(longest_queue(scheduler.schedule()));
}

TEST(short_prefixes_have_few_pieces_where_requests_are_merged_last) {
  ScheduleShape shape = real_shape(true, 132);
  const KernelTuning tuning = sm90_tuning(128);
  shape.tile_kv = 128;
  shape.item_steps = tuning.item_steps;
  shape.cost = tuning.cost;
  const auto pieces_of = [&](const HostBatch& batch) {
    OwningScheduler scheduler(shape, batch.size(), batch.qo_tokens());
    scheduler.make(batch.view());
    std::vector<int32_t> steps;
    for (const WorkTile& tile : scheduler.schedule().tiles) {
      if (tile.segment >= batch.size()) steps.push_back((tile.kv_end - tile.kv_begin) / 128);
    }
    return steps;
  };
  // Two row tiles of 8 heads with 8 steps.
  const HostBatch batch = decodes(64, 1024, 128);
  shape.merges_readers_last = false;
  CHECK(pieces_of(batch) == std::vector<int32_t>(128, 1));
  shape.merges_readers_last = true;
  CHECK(pieces_of(batch) == std::vector<int32_t>(32, 4));
  // Long prefixes are divided among all queues.
  CHECK(pieces_of(decodes(64, 8192, 128)) == std::vector<int32_t>(128, 8));
}

TEST(sharing_saves_what_it_should) {
  for (const int32_t num_requests : {16, 64}) {
    for (const int32_t prefix : {1024, 8192, 32768}) {
      const double part = part_of_time(real_shape(true, 264), decodes(num_requests, prefix, 128));
      std::printf("  prefix %5d x %d: %.2f of the time\n", prefix, num_requests, part);
      // A fully shared step of 64 rows costs 264 instead of 16 * 204.
      CHECK(part <= (prefix > 1024 ? 0.4 : 1.0));
    }
  }
}

/// Decodes and drafts of a system prompt, sets of examples and conversations, as deep as `depth`:
/// whole branches have a prefix in common, of a random length.
HostBatch random_tree(Random& random) {
  HostBatch batch;
  const int32_t size = random.pick({2, 4, 8, 16, 32, 64, 128, 256});
  const int32_t most_queries = random.one_in(4) ? 8 : 1;
  const int32_t most_own_keys = random.pick({1, 128, 1024, 8192});
  const bool has_prompts = random.one_in(8);
  for (int32_t r = 0; r < size; ++r) {
    const int32_t qo_len =
        has_prompts && random.one_in(8) ? random.between(1, 512) : random.between(1, most_queries);
    batch.add(qo_len, qo_len + random.between(0, most_own_keys));
  }
  share_randomly(random, random.pick({64, 512, 4096, 32768}), &batch);
  return batch;
}

ScheduleShape h200_shape(const KernelTuning& tuning, int32_t tile_kv, int32_t num_ctas,
                         const HostBatch& batch) {
  ScheduleShape shape = real_shape(true, num_ctas);
  shape.tile_kv = tile_kv;
  shape.max_partial_slots = 3 * num_ctas + batch.size();
  shape.item_steps = tuning.item_steps;
  shape.uncut_part = tuning.uncut_part;
  shape.cost = tuning.cost;
  return shape;
}

/// By the cost model, with all merges, no batch takes longer with groups than without them.
TEST(sharing_never_takes_longer) {
  for (const bool on_hopper : {false, true}) {
    Random random(on_hopper ? 7 : 6);
    std::vector<double> parts;  // of the time without groups
    int32_t num_shared = 0;
    for (int i = 0; i < 1000; ++i) {
      HostBatch batch = random_tree(random);
      const ScheduleShape shape = on_hopper ? h200_shape(sm90_tuning(128), 128, 132, batch)
                                            : h200_shape(sm80_tuning(64), 64, 264, batch);
      OwningScheduler scheduler(shape, batch.size(), batch.qo_tokens());
      scheduler.make(batch.view());
      num_shared += scheduler.schedule().prefixes.empty() ? 0 : 1;
      const int64_t with = ModelledRun(scheduler.schedule(), shape).time();
      batch.shared_prefixes.clear();
      scheduler.make(batch.view());
      const int64_t without = ModelledRun(scheduler.schedule(), shape).time();
      if (with > without) {
        check::fail(__FILE__, __LINE__,
                    "tree " + std::to_string(i) + ": " + std::to_string(with) + " instead of " +
                        std::to_string(without));
      }
      parts.push_back(static_cast<double>(with) / static_cast<double>(without));
    }
    std::sort(parts.begin(), parts.end());
    std::printf(
        "  %s: %d of 1000 trees shared; part of the time, percentiles 0 to 100 in steps of "
        "10:\n   ",
        on_hopper ? "sm90" : "sm80", num_shared);
    for (size_t p = 0; p <= 10; ++p) std::printf(" %.2f", parts[std::min<size_t>(p * 100, 999)]);
    std::printf("\n");
    CHECK(num_shared > 150);
  }
}

TEST(a_prefix_that_saves_nothing_is_left_alone) {
  const ScheduleShape shape = real_shape(true, 264);
  for (const HostBatch& batch : {decodes(1, 4096, 64), decodes(2, 64, 4096), decodes(64, 63, 64)}) {
    OwningScheduler scheduler(shape, batch.size(), batch.qo_tokens());
    scheduler.make(batch.view());
    CHECK(scheduler.schedule().prefixes.empty());
  }
}

TEST(prefixes_are_not_shared_where_that_costs_too_much) {
  HostBatch batch;
  for (int r = 0; r < 16; ++r) batch.add(8, 32800);
  batch.shared_prefixes = {0, 16, 32768};
  using Cost = int32_t CostModel::*;
  for (const Cost cost : {&CostModel::merge_row, &CostModel::share, &CostModel::share_row}) {
    ScheduleShape shape = real_shape(true, 264);
    for (const int32_t value : {0, 1000000}) {
      shape.cost.*cost = value;
      OwningScheduler scheduler(shape, batch.size(), batch.qo_tokens());
      scheduler.make(batch.view());
      CHECK_EQ(scheduler.schedule().prefixes.empty(), value > 0);
    }
  }
}

/// As measured on an H200 for decodes, which other kernels than those of sm90 compute faster
/// without sharing.
TEST(prefixes_that_are_worth_a_kernel_for_many_rows) {
  const auto gains = [](int32_t size, int32_t prefix) {
    const HostBatch batch = decodes(size, prefix, 128);
    OwningScheduler scheduler(h200_shape(sm90_tuning(128), 128, 132, batch), size, size);
    scheduler.make(batch.view());
    return scheduler.gains_by_prefixes();
  };
  CHECK(gains(16, 8192));
  CHECK(gains(64, 8192));
  CHECK(gains(8, 8192));
  CHECK(gains(64, 1024));
  CHECK(gains(8, 4096));
  CHECK(!gains(4, 6144));  // shared, and not worth it by the model
  CHECK(!gains(16, 512));  // not shared
}

TEST(prompts_that_fill_their_tiles_are_left_alone) {
  const ScheduleShape shape = real_shape(true, 264);
  HostBatch batch;
  for (int i = 0; i < 4; ++i) batch.add(100, 8292);
  batch.shared_prefixes = {0, 4, 8192};
  OwningScheduler scheduler(shape, batch.size(), batch.qo_tokens());
  scheduler.make(batch.view());
  CHECK(scheduler.schedule().prefixes.empty());
}

TEST(groups_of_the_same_requests_are_one_prefix) {
  const ScheduleShape shape = real_shape(true, 264);
  HostBatch batch = decodes(16, 8192, 64);
  batch.shared_prefixes = {0, 16, 8192, 0, 16, 4096, 0, 16, 8192};
  OwningScheduler scheduler(shape, batch.size(), batch.qo_tokens());
  scheduler.make(batch.view());
  CHECK_EQ(scheduler.schedule().prefixes.size(), size_t{1});
  CHECK_EQ(scheduler.schedule().prefixes[0].keys.begin, 0);
  CHECK_EQ(scheduler.schedule().prefixes[0].keys.end, 8192);
}

TEST(describe_says_what_is_shared) {
  AttentionOptions options;
  options.num_qo_heads = 32;
  options.num_kv_heads = 8;
  options.head_dim_qk = options.head_dim_vo = 8;
  options.page_size = 16;
  options.num_ctas = 4;
  Plan plan;
  CHECK(Plan::create(options, &plan).ok());
  const auto says = [&](const HostBatch& batch, const char* text) {
    CHECK(plan.plan(batch.view()).ok());
    CHECK(plan.describe().find(text) != std::string::npos);
  };
  says(decodes(16, 4096, 64), "1 shared prefixes given, 1 row tiles of them computed once");
  says(decodes(16, 4096, 64), "p0: keys [0, 4096) of requests 0 to 15");
  CHECK(plan.timeline_svg().find("prefix 0, keys") != std::string::npos);
  says(decodes(16, 31, 64), "none computed once: it would take no less time");
  HostBatch pairs;
  for (int r = 0; r < 64; ++r) pairs.add(1, 9000);
  for (int r = 0; r < 64; r += 2) {
    pairs.shared_prefixes.insert(pairs.shared_prefixes.end(), {r, 2, 8992});
  }
  says(pairs, "  ... and 16 more");
  for (const bool has_window : {false, true}) {
    AttentionOptions other = options;
    other.batch_invariant = !has_window;
    if (has_window) other.window_left = 9;
    CHECK(Plan::create(other, &plan).ok());
    says(decodes(16, 4096, 64), has_window ? "once: window_left" : "once: batch_invariant");
  }
}

}  // namespace
}  // namespace flashplan::test
