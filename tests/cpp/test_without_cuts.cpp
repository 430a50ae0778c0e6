// SPDX-License-Identifier: Apache-2.0
// Schedules without cuts do all the work too, in longer queues.
#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "check.h"
#include "plan/schedule/schedule.h"
#include "real_shape.h"
#include "schedule_invariants.h"

namespace flashplan::test {
namespace {

/// The makespan of a batch; checks that the schedule is right.
int64_t makespan_of(ScheduleShape shape, const HostBatch& batch, Division division) {
  shape.division = division;
  OwningScheduler scheduler = reserved(shape, batch);
  scheduler.make(batch.view());
  const Schedule& schedule = scheduler.schedule();
  const ScheduleBounds bounds = schedule_bounds(shape, batch.size(), batch.qo_tokens());
  CHECK_EQ(schedule_violation(schedule, batch.view(), shape, bounds), "");
  if (division != Division::kBalanced) {
    CHECK_EQ(schedule.num_cut, 0);
    CHECK(schedule.merges.empty());
  }
  return *std::max_element(schedule.cta_cost.begin(), schedule.cta_cost.end());
}

TEST(random_batches) {
  Random random(1);
  int32_t num_longer = 0, num_much_longer = 0;  // than with cuts
  for (int round = 0; round < 600; ++round) {
    const ScheduleShape shape = real_shape(random.pick({1, 8, 80, 132, 264}),
                                           random.pick({DeviceType::kCpu, DeviceType::kCuda}));
    const Phase phase = kAllPhases[random.between(0, 2)];
    const HostBatch batch =
        random_batch(random, kAllLengths[random.between(0, 3)], phase, random.between(1, 60),
                     phase == Phase::kDecode ? 10000 : 1000);
    const int64_t balanced = makespan_of(shape, batch, Division::kBalanced);
    num_longer += 5 * makespan_of(shape, batch, Division::kWhole) > 6 * balanced;
    num_much_longer += 5 * makespan_of(shape, batch, Division::kInOrder) > 6 * balanced;
  }
  std::printf("  longer by a fifth: %d of 600 without cuts, %d in order\n", num_longer,
              num_much_longer);
  CHECK(num_longer > 100);
  CHECK(num_much_longer > num_longer + 50);
}

TEST(one_long_request) {
  const ScheduleShape shape = real_shape(132, DeviceType::kCuda);
  HostBatch batch;
  batch.add(1, 64 * 1024);
  for (int i = 0; i < 16; ++i) batch.add(1, 1024);
  const int64_t balanced = makespan_of(shape, batch, Division::kBalanced);
  // Each of its 8 heads stays in one queue.
  CHECK(makespan_of(shape, batch, Division::kWhole) > 8 * balanced);
}

TEST(in_order_means_one_queue_after_the_other) {
  ScheduleShape shape = real_shape(4, DeviceType::kCuda);
  shape.division = Division::kInOrder;
  HostBatch batch;
  for (const int32_t kv_len : {4000, 10, 4000, 10, 4000, 10}) batch.add(1, kv_len);
  OwningScheduler scheduler = reserved(shape, batch);
  scheduler.make(batch.view());
  const Schedule& schedule = scheduler.schedule();
  int32_t num_items = 0;
  for (int32_t cta = 0; cta < 4; ++cta) {
    for (int32_t i = schedule.cta_indptr[static_cast<std::size_t>(cta)];
         i < schedule.cta_indptr[static_cast<std::size_t>(cta) + 1]; ++i) {
      const WorkTile& tile = schedule.tiles[static_cast<std::size_t>(i)];
      const int32_t items_of_tile = 8 / tile.num_kv_heads;
      const int32_t item = tile.segment * items_of_tile + tile.kv_head / tile.num_kv_heads;
      CHECK_EQ(item % 4, cta);
      ++num_items;
    }
  }
  CHECK(num_items >= 6);
}

}  // namespace
}  // namespace flashplan::test
