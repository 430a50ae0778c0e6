// SPDX-License-Identifier: Apache-2.0
// How evenly a schedule divides work among the queues, and in which order queues have it.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "plan/kernel/tuning.h"
#include "plan/schedule/schedule.h"
#include "real_shape.h"
#include "schedule_invariants.h"
#include "slow_planner.h"

namespace flashplan::test {
namespace {

TEST(equal_requests_are_cut_into_equal_pieces) {
  // 128 (request, head) pairs of 16 steps are cut in two for 264 queues: pieces of 8 steps each.
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

/// The tiles and costs of a kernel for latent attention, on 132 SMs.
ScheduleShape latent_shape(int32_t num_heads) {
  const KernelTuning tuning = sm90_mla_tuning();
  ScheduleShape shape;
  shape.group_size = num_heads;
  shape.tile_q = shape.tile_kv = 64;
  shape.num_ctas = 132;
  shape.max_partial_slots = 3 * shape.num_ctas;
  shape.item_steps = tuning.item_steps;
  shape.uncut_part = tuning.uncut_part;
  shape.cost = tuning.cost;
  return shape;
}

/// The steps of the pieces of `num_requests` latent decodes of 128 heads, the least and the most,
/// and the number of pieces.
std::array<int32_t, 3> latent_pieces(int32_t num_requests, int32_t kv_len) {
  const ScheduleShape shape = latent_shape(128);
  HostBatch batch;
  for (int request = 0; request < num_requests; ++request) batch.add(1, kv_len);
  OwningScheduler scheduler = reserved(shape, batch);
  scheduler.make(batch.view());
  CHECK_EMPTY(schedule_violation(scheduler.schedule(), batch.view(), shape,
                                 schedule_bounds(shape, batch.size(), batch.qo_tokens())));
  std::array<int32_t, 3> pieces = {INT32_MAX, 0, 0};
  for (const WorkTile& tile : scheduler.schedule().tiles) {
    const int32_t steps = (tile.kv_end - tile.kv_begin) / shape.tile_kv;
    pieces = {std::min(pieces[0], steps), std::max(pieces[1], steps), pieces[2] + 1};
  }
  return pieces;
}

TEST(little_latent_work_is_cut_into_as_many_pieces_as_pay) {
  using Pieces = std::array<int32_t, 3>;
  // 2 tiles of 32 steps each: a piece is one step, although a cut costs three.
  CHECK(latent_pieces(1, 2048) == (Pieces{1, 1, 64}));
  // With more steps, more states would have to be merged, so pieces are longer.
  CHECK(latent_pieces(1, 4096) == (Pieces{2, 2, 64}));
  CHECK(latent_pieces(1, 8192)[1] == 3);
  // Pieces take longer than a cut.
  CHECK(latent_pieces(4, 4096) == (Pieces{4, 4, 128}));
  CHECK(latent_pieces(66, 4096) == (Pieces{64, 64, 132}));
}

TEST(each_latent_tile_has_a_queue) {
  // The long request is cut into pieces of two steps. Of pieces as long, all tiles together would
  // have 82, but each of the 101 tiles can run on an SM of its own.
  const ScheduleShape shape = latent_shape(64);
  HostBatch batch;
  batch.add(1, 64 * 64);
  for (int request = 0; request < 100; ++request) batch.add(1, 64);
  OwningScheduler scheduler = reserved(shape, batch);
  scheduler.make(batch.view());
  const std::vector<int64_t>& costs = scheduler.schedule().cta_cost;
  const auto has_work = [](int64_t cost) { return cost > 0; };
  CHECK(std::count_if(costs.begin(), costs.end(), has_work) == 101);
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

/// Plans `batch_size` equal prompts by the tiles and costs of a Hopper kernel on an H200, without
/// cuts. Returns the cost of the longest queue, divided by the mean.
double imbalance_without_cuts(int32_t batch_size, int32_t qo_len, int32_t kv_len,
                              int32_t num_kv_heads, int32_t group_size) {
  const KernelTuning tuning = sm90_tuning(128);
  ScheduleShape shape;
  shape.num_kv_heads = num_kv_heads;
  shape.group_size = group_size;
  shape.tile_q = shape.tile_kv = 128;
  shape.num_ctas = 132;
  shape.cuts = false;
  shape.item_steps = tuning.item_steps;
  shape.uncut_part = tuning.uncut_part;
  shape.cost = tuning.cost;
  HostBatch batch;
  for (int32_t r = 0; r < batch_size; ++r) batch.add(qo_len, kv_len);
  OwningScheduler scheduler = reserved(shape, batch);
  scheduler.make(batch.view());
  const std::vector<int64_t>& costs = scheduler.schedule().cta_cost;
  const int64_t total = std::accumulate(costs.begin(), costs.end(), int64_t{0});
  const double longest = static_cast<double>(*std::max_element(costs.begin(), costs.end()));
  std::printf("  %2d x %5d of %5d, %2d heads: %.3f\n", batch_size, qo_len, kv_len, num_kv_heads,
              longest * 132 / static_cast<double>(total));
  return longest * 132 / static_cast<double>(total);
}

TEST(balance_without_cuts) {
  CHECK(imbalance_without_cuts(16, 1024, 1024, 16, 1) < 1.03);
  CHECK(imbalance_without_cuts(16, 4096, 4096, 16, 1) < 1.01);
  CHECK(imbalance_without_cuts(4, 8192, 8192, 8, 4) < 1.01);
  CHECK(imbalance_without_cuts(1, 4096, 4096, 8, 4) < 1.02);
  CHECK(imbalance_without_cuts(1, 2048, 32768, 8, 4) < 1.05);  // four tiles of 3.9
  CHECK(imbalance_without_cuts(16, 32, 4096, 8, 4) < 1.05);    // one row tile for each queue
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
  // Each head has four row tiles, of 2, 4, 6 and 8 steps. Each of 132 queues gets eight tiles.
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
