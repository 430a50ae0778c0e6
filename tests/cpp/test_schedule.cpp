// SPDX-License-Identifier: Apache-2.0
// Properties of schedules over thousands of random batches.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "allocations.h"
#include "check.h"
#include "plan/schedule/cost_classes.h"
#include "plan/schedule/schedule.h"
#include "random_batch.h"
#include "real_shape.h"
#include "schedule_invariants.h"
#include "slow_planner.h"

namespace flashplan::test {
namespace {

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
  } else if (random.one_in(3)) {
    shape.cuts = false;
  }
  if (random.one_in(4))
    (random.one_in(2) ? shape.min_rows : shape.max_rows) = random.between(1, 200);
  shape.cost = random_costs(random);
  if (random.one_in(2)) shape.item_steps = random.pick({1, 8, 32, 1000});
  if (random.one_in(2)) shape.uncut_part = random.pick({1, 16, 1000});
  return shape;
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
    shape.min_rows = 1;
    shape.max_rows = INT32_MAX;
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

}  // namespace
}  // namespace flashplan::test
