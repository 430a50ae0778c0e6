// SPDX-License-Identifier: Apache-2.0
// Properties of schedules over thousands of random batches.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "allocations.h"
#include "check.h"
#include "cpu/engine.h"
#include "fake_kernels.h"
#include "owning_scheduler.h"
#include "plan/cost_classes.h"
#include "plan/schedule.h"
#include "plan/select_kernel.h"
#include "random_batch.h"
#include "schedule_invariants.h"
#include "slow_planner.h"

namespace flashplan::test {
namespace {

/// The tiles and costs that a user gets, for 8 kv heads of 4 query heads.
ScheduleShape real_shape(int32_t num_ctas, DeviceType device = DeviceType::kCpu) {
  AttentionOptions options;
  options.num_qo_heads = 32;
  options.num_kv_heads = 8;
  options.head_dim_qk = options.head_dim_vo = 128;
  options.num_ctas = num_ctas;
  options.device = {device, 0};
  const Kernel kernels[] = {fake_kernel("bf16_d128", {80})};
  DeviceLimits limits;
  limits.kernels = device == DeviceType::kCpu ? cpu::kernels() : kernels;
  limits.num_gpus = 1;
  limits.major = 8;
  KernelChoices choices;
  CHECK(select_kernel(options, limits, &choices).ok());
  const KernelChoice& choice = choices.first;
  ScheduleShape shape;
  shape.num_kv_heads = options.num_kv_heads;
  shape.group_size = 4;
  shape.tile_q = choice.kernel.geometry.tile_q;
  shape.tile_kv = choice.kernel.geometry.tile_kv;
  shape.num_ctas = num_ctas;
  shape.max_partial_slots = 2 * num_ctas;
  shape.item_steps = choice.kernel.tuning.item_steps;
  shape.cost = choice.kernel.tuning.cost;
  return shape;
}

ScheduleShape random_shape(Random& random) {
  ScheduleShape shape;
  shape.num_kv_heads = random.pick({1, 2, 3, 8, 16, 40});
  shape.group_size = random.pick({1, 3, 4, 7, 8, 16, 128});
  shape.mask.causal = !random.one_in(3);
  shape.paged = random.one_in(2);
  shape.mask.window_left = random.one_in(3) ? random.between(0, 600) : -1;
  shape.tile_q = random.pick({1, 16, 32, 64, 128, 192});
  shape.tile_kv = random.pick({16, 32, 64, 80, 128});
  shape.heads_at_once = random.between(1, 2);
  shape.num_ctas = random.one_in(2) ? random.between(1, 264) : random.pick({1, 2, 3, 132, 264});
  shape.max_partial_slots = random.pick({0, 1, 2, 7, 2 * shape.num_ctas, 4 * shape.num_ctas});
  if (random.one_in(3)) {
    shape.chunk_kv = random.one_in(4) && 4096 % shape.tile_kv == 0
                         ? 4096
                         : shape.tile_kv * random.pick({1, 2, 4, 8});
    shape.max_partial_slots = random.pick({0, 5, 50, 5000});
  }
  shape.cost = random_costs(random);
  if (random.one_in(2)) shape.item_steps = random.pick({1, 8, 32, 1000});
  if (random.one_in(2)) shape.uncut_part = random.pick({1, 16, 1000});
  return shape;
}

OwningScheduler reserved(const ScheduleShape& shape, const HostBatch& batch) {
  return {shape, batch.size(), batch.qo_tokens()};
}

std::string check_batch(const ScheduleShape& shape, const HostBatch& batch) {
  OwningScheduler scheduler = reserved(shape, batch);
  scheduler.make(batch.view());
  return schedule_violation(scheduler.schedule(), batch.view(), shape,
                            schedule_bounds(shape, batch.size(), batch.qo_tokens()));
}

bool equal(const Schedule& a, const Schedule& b) {
  const auto same = [](const auto& x, const auto& y) {
    return x.size() == y.size() &&
           (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0);
  };
  return same(a.segments, b.segments) && same(a.cta_indptr, b.cta_indptr) &&
         same(a.tiles, b.tiles) && same(a.merges, b.merges) && same(a.cta_cost, b.cta_cost) &&
         a.num_partial_rows == b.num_partial_rows;
}

/// The keys of one row tile, as one CTA is given them.
KeySpan visible_keys(ScheduleShape shape, int32_t qo_len, int32_t kv_len, int32_t row_tile) {
  shape.num_ctas = 1;
  const int32_t qo_indptr[] = {0, qo_len};
  OwningScheduler scheduler(shape, 1, qo_len);
  scheduler.make({qo_indptr, &kv_len, nullptr, 1});
  for (const WorkTile& tile : scheduler.schedule().tiles) {
    if (tile.row_tile == row_tile) return {tile.kv_begin, tile.kv_end};
  }
  return {-1, -1};
}

TEST(visible_keys_agree_with_the_mask) {
  Random random(1);
  for (int i = 0; i < 3000; ++i) {
    ScheduleShape shape = random_shape(random);
    shape.mask.window_left = random.one_in(2) ? random.between(0, 100) : -1;
    const int32_t qo_len = random.between(1, 40);
    const int32_t kv_len = random.between(0, 200);
    const int32_t rows = qo_len * shape.group_size;
    const int32_t row_tile = random.between(0, (rows - 1) / shape.tile_q);
    const int32_t first = row_tile * shape.tile_q;
    const int32_t last = std::min(first + shape.tile_q, rows) - 1;
    int64_t begin = kv_len;
    int64_t end = 0;
    for (int32_t query = first / shape.group_size; query <= last / shape.group_size; ++query) {
      const RowKeys slow = slow_row_keys(shape, qo_len, kv_len, query);
      const RowKeys fast = row_keys(shape, qo_len, kv_len, query);
      CHECK_EQ(slow.begin, fast.begin);
      CHECK_EQ(slow.end, fast.end);
      if (slow.begin == slow.end) continue;
      begin = std::min(begin, slow.begin);
      end = std::max(end, slow.end);
    }
    const KeySpan range = visible_keys(shape, qo_len, kv_len, row_tile);
    if (begin < end) {
      CHECK_EQ(range.begin, begin - begin % shape.tile_kv);
      CHECK_EQ(range.end, end);
    } else {
      CHECK_EQ(range.begin, range.end);
    }
  }
}

TEST(visible_keys_of_extreme_lengths) {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  ScheduleShape shape = real_shape(4);
  CHECK_EQ(visible_keys(shape, 1, kMax, 0).end, kMax);
  CHECK_EQ(visible_keys(shape, 1 << 16, 0, 0).end, 0);
  shape.mask.window_left = kMax;
  CHECK_EQ(visible_keys(shape, 1, kMax, 0).begin, 0);
  shape.mask.window_left = 0;
  CHECK_EQ(visible_keys(shape, 1, kMax, 0).begin, kMax / shape.tile_kv * shape.tile_kv);
}

TEST(invariants_of_random_schedules) {
  Random random(2);
  for (int i = 0; i < check::rounds(8000); ++i) {
    const ScheduleShape shape = random_shape(random);
    const int32_t batch_size = random.one_in(10) ? random.between(0, 300) : random.between(0, 40);
    const Phase phase = kAllPhases[random.between(0, 2)];
    const int32_t max_kv_len = phase == Phase::kDecode ? random.pick({100, 3000, 100000}) : 700;
    HostBatch batch =
        random_batch(random, kAllLengths[random.between(0, 3)], phase, batch_size, max_kv_len);
    if (random.one_in(4)) limit_keys_randomly(random, &batch);
    const ScheduleBounds bounds = schedule_bounds(shape, batch.size(), batch.qo_tokens());
    if (bounds.row_tiles > 5000) continue;
    const std::string what = check_batch(shape, batch);
    if (!what.empty()) check::fail(__FILE__, __LINE__, "round " + std::to_string(i) + ": " + what);
  }
}

TEST(expensive_work_comes_first) {
  for (int64_t cost = 1; cost < int64_t{1} << 40; cost += 1 + cost / 50) {
    CHECK(CostClasses::of(2 * cost + 8) < CostClasses::of(cost));
    CHECK(CostClasses::of(cost + 1) <= CostClasses::of(cost));
  }
  CHECK(CostClasses::of(0) < CostClasses::kLast);
}

TEST(one_long_request_is_split) {
  for (const int32_t chunk_kv : {0, 512}) {
    ScheduleShape shape = real_shape(132);
    shape.chunk_kv = chunk_kv;
    shape.max_partial_slots = 5000;
    HostBatch batch;
    batch.add(1, 131072);
    CHECK_EMPTY(check_batch(shape, batch));
    OwningScheduler scheduler = reserved(shape, batch);
    scheduler.make(batch.view());
    CHECK(scheduler.schedule().merges.size() >= 8);
    shape.max_partial_slots = 0;
    scheduler = reserved(shape, batch);
    scheduler.make(batch.view());
    CHECK(scheduler.schedule().merges.empty());
    CHECK_EMPTY(check_batch(shape, batch));
  }
}

TEST(equal_requests_are_cut_into_equal_pieces) {
  // 128 heads of 16 steps for 264 queues: 8 and 8 steps, not 9 and 7.
  const ScheduleShape shape = real_shape(264, DeviceType::kCuda);
  HostBatch batch;
  for (int request = 0; request < 16; ++request) batch.add(1, 1024);
  OwningScheduler scheduler = reserved(shape, batch);
  scheduler.make(batch.view());
  CHECK(scheduler.schedule().tiles.size() == 256);
  for (const WorkTile& tile : scheduler.schedule().tiles) {
    CHECK(tile.num_kv_heads == 1 && tile.kv_end - tile.kv_begin == 512);
  }
}

TEST(heads_are_cut_in_pairs) {
  ScheduleShape shape = real_shape(264, DeviceType::kCuda);
  shape.heads_at_once = 2;
  for (const auto& [batch_size, pairs] : {std::pair{50, true}, {2, false}}) {
    HostBatch batch;
    for (int i = 0; i < batch_size; ++i) batch.add(1, 4096);
    CHECK_EMPTY(check_batch(shape, batch));
    OwningScheduler scheduler = reserved(shape, batch);
    scheduler.make(batch.view());
    const Schedule& schedule = scheduler.schedule();
    CHECK(!schedule.merges.empty());
    for (const WorkTile& tile : schedule.tiles) {
      CHECK(tile.merge < 0 || tile.num_kv_heads == (pairs ? 2 : 1));
    }
  }
}

int64_t longest_queue(const ScheduleShape& shape, const HostBatch& batch) {
  OwningScheduler scheduler = reserved(shape, batch);
  scheduler.make(batch.view());
  const std::vector<int64_t>& costs = scheduler.schedule().cta_cost;
  return *std::max_element(costs.begin(), costs.end());
}

TEST(heads_are_cut_in_pairs_only_where_this_costs_little) {
  ScheduleShape shape = real_shape(264, DeviceType::kCuda);
  const auto check_lens = [&](const std::vector<int32_t>& kv_lens) {
    HostBatch batch;
    for (const int32_t kv_len : kv_lens) batch.add(1, kv_len);
    shape.heads_at_once = 1;
    const int64_t one_by_one = longest_queue(shape, batch);
    shape.heads_at_once = 2;
    CHECK(longest_queue(shape, batch) <= one_by_one + one_by_one / 16 + 1);
  };
  for (const auto& [batch_size, kv_len] : {std::pair{33, 256}, {32, 512}, {66, 1024}, {20, 300}}) {
    check_lens(std::vector<int32_t>(static_cast<size_t>(batch_size), kv_len));
  }
  Random random(11);
  for (int i = 0; i < check::rounds(500); ++i) {
    std::vector<int32_t> kv_lens(static_cast<size_t>(random.between(1, 200)));
    const int32_t most = random.pick({100, 1000, 10000});
    for (int32_t& kv_len : kv_lens) kv_len = random.between(1, most);
    check_lens(kv_lens);
  }
}

TEST(empty_batches) {
  HostBatch batch;
  CHECK_EMPTY(check_batch(real_shape(132), batch));
  for (int i = 0; i < 5; ++i) batch.add(0, 100);
  CHECK_EMPTY(check_batch(real_shape(132), batch));
  for (int i = 0; i < 5; ++i) batch.add(3, 0);
  CHECK_EMPTY(check_batch(real_shape(132), batch));
  CHECK_EMPTY(check_batch(real_shape(1), batch));
}

TEST(same_lengths_give_the_same_schedule) {
  Random random(3);
  for (int i = 0; i < 300; ++i) {
    const ScheduleShape shape = random_shape(random);
    const HostBatch batch = random_batch(random, kAllLengths[random.between(0, 3)], Phase::kMixed,
                                         random.between(1, 60), 2000);
    const HostBatch other = random_batch(random, Lengths::kZipf, Phase::kDecode, 1, 500);
    OwningScheduler first = reserved(shape, batch);
    first.make(batch.view());
    // The second one has planned another batch before: nothing of it may remain.
    OwningScheduler second = reserved(shape, batch);
    second.make(other.view());
    second.make(batch.view());
    CHECK(equal(first.schedule(), second.schedule()));
  }
}

TEST(make_does_not_allocate) {
  Random random(4);
  for (int i = 0; i < 500; ++i) {
    const ScheduleShape shape = random_shape(random);
    const HostBatch batch =
        random_batch(random, kAllLengths[i % 4], kAllPhases[i % 3], random.between(0, 60), 1000);
    OwningScheduler scheduler = reserved(shape, batch);
    const int64_t before = num_allocations;
    scheduler.make(batch.view());
    CHECK_EQ(before, num_allocations);
  }
}

int64_t largest(const std::vector<int64_t>& costs) {
  return *std::max_element(costs.begin(), costs.end());
}

TEST(makespan_against_algorithm_1) {
  Random random(5);
  std::vector<double> ratios;
  while (ratios.size() < 2000) {
    const ScheduleShape shape = real_shape(random.pick({1, 8, 80, 132, 264}),
                                           random.pick({DeviceType::kCpu, DeviceType::kCuda}));
    const Phase phase = kAllPhases[random.between(0, 2)];
    const HostBatch batch =
        random_batch(random, kAllLengths[random.between(0, 3)], phase, random.between(1, 60),
                     phase == Phase::kDecode ? 10000 : 1000);
    OwningScheduler scheduler = reserved(shape, batch);
    scheduler.make(batch.view());
    const int64_t slow = slow_makespan(shape, batch.view());
    const int64_t fast = largest(scheduler.schedule().cta_cost);
    CHECK(fast <= acceptable_makespan(shape, slow));
    if (slow > 0) ratios.push_back(static_cast<double>(fast) / static_cast<double>(slow));
  }
  std::sort(ratios.begin(), ratios.end());
  std::printf("  makespan over Algorithm 1's: median %.3f, p99 %.3f, worst %.3f\n", ratios[1000],
              ratios[1980], ratios.back());
  CHECK(ratios[1000] <= 1.02);
}

// A queue cannot be evened out by less than a tile or than what a cut costs: balance is asked of
// batches that give each CTA the work of four full tiles (tile_q rows, tile_kv keys) and of eight
// cuts or more. On a CPU a cut costs a sixteenth of a tile, on a GPU as much as three tiles.
void check_balance(DeviceType device, Lengths lengths, Phase phase, const char* name) {
  Random random(6 + static_cast<uint64_t>(lengths));
  const bool decode = phase == Phase::kDecode;
  const int32_t most_requests = decode ? 256 : phase == Phase::kMixed ? 64 : 16;
  std::vector<double> imbalances;
  while (imbalances.size() < 1000) {
    const ScheduleShape shape = real_shape(random.pick({8, 80, 132, 264}), device);
    const HostBatch batch =
        random_batch(random, lengths, phase, random.between(1, most_requests),
                     decode ? random.pick({1000, 10000, 100000}) : random.pick({2000, 8000}));
    OwningScheduler scheduler = reserved(shape, batch);
    scheduler.make(batch.view());
    const int64_t enough = 4 * slow_cost(shape, shape.tile_q, shape.tile_kv) +
                           8 * slow_split_cost(shape, shape.tile_q);
    const std::vector<int64_t>& costs = scheduler.schedule().cta_cost;
    const int64_t total = std::accumulate(costs.begin(), costs.end(), int64_t{0});
    if (total < shape.num_ctas * enough) continue;
    imbalances.push_back(static_cast<double>(largest(costs)) * shape.num_ctas /
                         static_cast<double>(total));
  }
  std::sort(imbalances.begin(), imbalances.end());
  std::printf("  %-18s max/mean CTA cost: median %.3f, p99 %.3f, worst %.3f\n", name,
              imbalances[500], imbalances[990], imbalances.back());
  CHECK(imbalances[500] <= 1.10);
  CHECK(imbalances.back() <= 1.25);
}

TEST(balance) {
  for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
    std::printf("  %s\n", device == DeviceType::kCpu ? "on a CPU" : "on a GPU");
    check_balance(device, Lengths::kUniform, Phase::kDecode, "uniform, decode");
    check_balance(device, Lengths::kZipf, Phase::kDecode, "Zipf, decode");
    check_balance(device, Lengths::kOneGiant, Phase::kDecode, "one giant, decode");
    check_balance(device, Lengths::kUniform, Phase::kPrefill, "uniform, prefill");
    check_balance(device, Lengths::kZipf, Phase::kPrefill, "Zipf, prefill");
    check_balance(device, Lengths::kOneGiant, Phase::kPrefill, "one giant, prefill");
    check_balance(device, Lengths::kUniform, Phase::kMixed, "uniform, mixed");
    check_balance(device, Lengths::kZipf, Phase::kMixed, "Zipf, mixed");
  }
}

/// How many (request, kv head) pairs the tiles at one place of all queues read, on average.
double heads_at_once(const Schedule& schedule) {
  size_t longest = 0;
  for (size_t c = 0; c < schedule.cta_cost.size(); ++c) {
    longest =
        std::max(longest, static_cast<size_t>(schedule.cta_indptr[c + 1] - schedule.cta_indptr[c]));
  }
  size_t num_pairs = 0;
  for (size_t place = 0; place < longest; ++place) {
    std::set<std::pair<int32_t, int32_t>> pairs;
    for (size_t c = 0; c < schedule.cta_cost.size(); ++c) {
      const size_t i = static_cast<size_t>(schedule.cta_indptr[c]) + place;
      if (i >= static_cast<size_t>(schedule.cta_indptr[c + 1])) continue;
      const WorkTile& tile = schedule.tiles[i];
      for (int32_t head = 0; head < tile.num_kv_heads; ++head) {
        pairs.insert({tile.segment, tile.kv_head + head});
      }
    }
    num_pairs += pairs.size();
  }
  return static_cast<double>(num_pairs) / static_cast<double>(longest);
}

/// Plans a prompt and decodes: every other queue has its prompts first, the others have them last.
void check_decodes_beside_prompts(int32_t num_decodes, int32_t kv_len) {
  const ScheduleShape shape = real_shape(132, DeviceType::kCuda);
  HostBatch batch;
  batch.add(2048, 8192);
  for (int32_t i = 0; i < num_decodes; ++i) batch.add(1, kv_len);
  OwningScheduler scheduler = reserved(shape, batch);
  scheduler.make(batch.view());
  const Schedule& schedule = scheduler.schedule();
  int num_mixed = 0;
  for (size_t c = 0; c < 132; ++c) {
    const bool prompts_first = c % 2 == 0;
    bool has_first = false;
    bool has_last = false;
    for (int32_t i = schedule.cta_indptr[c]; i < schedule.cta_indptr[c + 1]; ++i) {
      const WorkTile& tile = schedule.tiles[static_cast<size_t>(i)];
      if (tile.merge >= 0) continue;  // parts of splits come before all
      const bool is_first = (tile.segment == 0) == prompts_first;
      CHECK(!is_first || !has_last);
      (is_first ? has_first : has_last) = true;
    }
    num_mixed += has_first && has_last ? 1 : 0;
  }
  CHECK(num_mixed > 132 / 2);
}

TEST(decodes_run_beside_prompts) {
  check_decodes_beside_prompts(64, 4096);  // which are cut
  check_decodes_beside_prompts(256, 256);  // which are whole
}

TEST(ctas_share_keys) {
  ScheduleShape shape = real_shape(264, DeviceType::kCuda);
  HostBatch batch;
  for (int i = 0; i < 4; ++i) batch.add(4096, 4096);
  const auto measure = [&] {
    OwningScheduler scheduler = reserved(shape, batch);
    scheduler.make(batch.view());
    return heads_at_once(scheduler.schedule());
  };
  const double in_groups = measure();
  shape.item_steps = 0;
  const double apart = measure();
  std::printf(
      "  of 32 (request, head) pairs at one place of all queues: %.1f, without groups %.1f\n",
      in_groups, apart);
  CHECK(in_groups <= 8);
  CHECK(apart >= 16);
}

TEST(queues_get_short_and_long_row_tiles_alike) {
  // Four row tiles of 2, 4, 6 and 8 steps for each head, eight rounds of 132 queues.
  ScheduleShape shape = real_shape(132, DeviceType::kCuda);
  shape.group_size = 1;
  shape.item_steps = 1;
  HostBatch batch;
  for (int request = 0; request < 33; ++request) batch.add(512, 512);
  OwningScheduler scheduler = reserved(shape, batch);
  scheduler.make(batch.view());
  const Schedule& s = scheduler.schedule();
  CHECK(s.tiles.size() == 33 * 8 * 4);
  for (size_t cta = 0; cta < 132; ++cta) {
    std::set<int32_t> row_tiles;
    for (int32_t i = s.cta_indptr[cta]; i < s.cta_indptr[cta + 1]; ++i) {
      row_tiles.insert(s.tiles[static_cast<size_t>(i)].row_tile);
    }
    CHECK(row_tiles.size() == 4);
  }
}

}  // namespace
}  // namespace flashplan::test
