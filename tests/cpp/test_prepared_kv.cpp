// SPDX-License-Identifier: Apache-2.0
// Which keys are prepared: those that many row tiles read, as far as there is room for them.
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "check.h"
#include "fake_devices.h"
#include "plan/kernel/kernel.h"
#include "plan/prepared_kv.h"
#include "plan/schedule/schedule_shape.h"
#include "plan/workspace_layout.h"
#include "random_batch.h"

namespace flashplan::test {
namespace {

/// Prepared tiles of 128 keys, and row tiles of 128 rows.
ScheduleShape shape_of(int32_t prepare_reads, int32_t group_size = 4) {
  ScheduleShape shape;
  shape.num_kv_heads = 8;
  shape.group_size = group_size;
  shape.tile_q = shape.tile_kv = 128;
  shape.prepare_reads = prepare_reads;
  return shape;
}

/// A batch, and where its requests are prepared.
struct Prepared {
  std::vector<int32_t> qo_indptr = {0};
  std::vector<int32_t> kv_lens;
  Batch batch;
  std::vector<Segment> segments;
  std::vector<int32_t> first_tiles;

  Prepared(const std::vector<int32_t>& qo_lens, std::vector<int32_t> lens)
      : kv_lens(std::move(lens)), segments(kv_lens.size()) {
    for (const int32_t qo_len : qo_lens) qo_indptr.push_back(qo_indptr.back() + qo_len);
    batch.qo_indptr = qo_indptr.data();
    batch.kv_lens = kv_lens.data();
    batch.batch_size = static_cast<int32_t>(kv_lens.size());
  }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  /// The number of tiles.
  int32_t choose(const ScheduleShape& shape, int32_t max_tiles = 100) {
    first_tiles.assign(segments.size() + 1, 77);
    int32_t num_tiles = -1;
    const int32_t count =
        choose_prepared_kv(batch, shape, segments, max_tiles, {first_tiles.data(), &num_tiles});
    CHECK_EQ(count, num_tiles);
    CHECK_EQ(first_tiles.back(), 77);
    first_tiles.pop_back();
    if (count == 0) CHECK(first_tiles == std::vector<int32_t>(segments.size(), kNotPrepared));
    return count;
  }
};

TEST(keys_that_many_row_tiles_read) {
  // 4096 queries of 4 heads are 128 row tiles, of which a key is read by 64.
  Prepared prompt({4096}, {4096});
  CHECK_EQ(prompt.choose(shape_of(64)), 32);
  CHECK_EQ(prompt.first_tiles[0], 0);
  CHECK_EQ(prompt.choose(shape_of(65)), 0);
  // Without a causal mask all of them read it.
  ScheduleShape full = shape_of(128);
  full.mask.causal = false;
  CHECK_EQ(prompt.choose(full), 32);
  full.prepare_reads = 129;
  CHECK_EQ(prompt.choose(full), 0);
  // A chunk at the end of a long request: 16 row tiles read nearly all of its keys.
  Prepared chunk({512}, {8000});
  CHECK_EQ(chunk.choose(shape_of(15)), 63);
  CHECK_EQ(chunk.choose(shape_of(16)), 0);
  // More queries than keys: half of the keys are seen at the mean.
  Prepared short_keys({4096}, {100});
  CHECK_EQ(short_keys.choose(shape_of(64)), 1);
  CHECK_EQ(short_keys.choose(shape_of(65)), 0);
}

TEST(requests_of_another_kernel_are_not_prepared) {
  Prepared batch({16, 4096, 17}, {6400, 4096, 1});
  ScheduleShape shape = shape_of(20);
  CHECK_EQ(batch.choose(shape), 0);  // the keys of the first request are read once
  shape.min_rows = 65;
  CHECK_EQ(batch.choose(shape), 33);
  CHECK_EQ(batch.first_tiles[1], 0);
  CHECK_EQ(batch.first_tiles[2], 32);
}

TEST(all_requests_or_none) {
  // 15 reads of each of 32 tiles. The 64 of each of 32 others count with 3/2 of prepare_reads.
  Prepared batch({512, 4096}, {4096, 4096});
  CHECK_EQ(batch.choose(shape_of(30)), 64);
  CHECK_EQ(batch.first_tiles[0], 0);
  CHECK_EQ(batch.first_tiles[1], 32);
  CHECK_EQ(batch.choose(shape_of(31)), 0);
  // Only as far as there is room.
  CHECK_EQ(batch.choose(shape_of(30), 64), 64);
  CHECK_EQ(batch.choose(shape_of(30), 63), 0);
  CHECK_EQ(batch.choose(shape_of(30), 0), 0);
}

TEST(some_requests) {
  ScheduleShape shape = shape_of(15);
  shape.prepares_some = true;
  // 15 reads of each of 32 tiles, none of two of a decode, 64 reads of each of 32 others.
  Prepared batch({512, 1, 0, 4096}, {4096, 200, 300, 4096});
  const auto tiles = [&](int32_t max_tiles) {
    CHECK_EQ(batch.choose(shape, max_tiles) % 32, 0);
    return batch.first_tiles;
  };
  using Tiles = std::vector<int32_t>;
  CHECK(tiles(100) == Tiles({0, kNotPrepared, kNotPrepared, 32}));
  // As far as there is room, in their order.
  CHECK(tiles(63) == Tiles({0, kNotPrepared, kNotPrepared, kNotPrepared}));
  shape.prepare_reads = 16;
  CHECK(tiles(64) == Tiles({kNotPrepared, kNotPrepared, kNotPrepared, 0}));
  // No sum of reads decides, but those of each request.
  shape.prepare_reads = 65;
  CHECK(tiles(100) == Tiles(4, kNotPrepared));
  shape.prepare_reads = 1;
  batch.segments.emplace_back();
  CHECK_EQ(batch.choose(shape), 0);
  batch.segments.pop_back();
  const int32_t ranges = 0;
  batch.batch.key_ranges = &ranges;
  CHECK_EQ(batch.choose(shape), 0);
}

TEST(requests_without_queries_or_keys) {
  Prepared batch({0, 4096, 4096, 9}, {5000, 0, 4096, 200});
  CHECK_EQ(batch.choose(shape_of(6)), 34);
  CHECK_EQ(batch.first_tiles[2], 0);
  CHECK_EQ(batch.first_tiles[3], 32);
  Prepared none({0, 9}, {5000, 0});
  CHECK_EQ(none.choose(shape_of(0)), 0);
  Prepared empty({}, {});
  CHECK_EQ(empty.choose(shape_of(0)), 0);
}

TEST(ranges_of_keys_and_prefixes_prepare_none) {
  Prepared batch({4096}, {4096});
  batch.segments.emplace_back();
  CHECK_EQ(batch.choose(shape_of(6)), 0);
  batch.segments.pop_back();
  const std::vector<int32_t> ranges(2 * 4096);
  batch.batch.key_ranges = ranges.data();
  CHECK_EQ(batch.choose(shape_of(6)), 0);
}

TEST(tiles_of_requests_do_not_overlap) {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    std::vector<int32_t> qo_lens;
    std::vector<int32_t> kv_lens;
    for (int32_t r = random.between(1, 20); r > 0; --r) {
      qo_lens.push_back(random.one_in(5) ? 0 : random.between(1, 3000));
      kv_lens.push_back(qo_lens.back() + random.between(0, 3000));
    }
    Prepared batch(qo_lens, kv_lens);
    const int32_t max_tiles = random.between(0, 600);
    const int32_t count = batch.choose(shape_of(random.between(1, 40)), max_tiles);
    CHECK(count <= max_tiles);
    if (count == 0) continue;
    int32_t next = 0;
    for (size_t r = 0; r < qo_lens.size(); ++r) {
      if (qo_lens[r] == 0) continue;
      CHECK_EQ(batch.first_tiles[r], next);
      next += (kv_lens[r] + 127) / 128;
    }
    CHECK_EQ(next, count);
  }
}

/// A kernel whose prepared tiles have 32 KB of keys, and as many of values, for each kv head.
KernelChoice choice_for_prepared() {
  KernelChoice choice{.kernel = fake_kernel("gather", {90, 'a'}), .num_ctas = 132};
  choice.kernel.geometry.tile_kv = 128;
  choice.kernel.geometry.prepared_key_bytes = choice.kernel.geometry.prepared_value_bytes = 32768;
  choice.kernel.tuning.prepare_reads = 16;
  return choice;
}

TEST(room_for_prepared_tiles) {
  const Kernel kernel = choice_for_prepared().kernel;
  AttentionOptions o = llama_on_gpu();  // of 8 kv heads: a tile has 512 KB
  o.max_batch_size = 4;
  o.max_qo_tokens = 1000;  // 8 tiles
  CHECK_EQ(most_prepared_tiles(o, kernel), 16 * 8);
  o.max_qo_tokens = 8192;
  CHECK_EQ(most_prepared_tiles(o, kernel), 256);  // 128 MB
  o.max_qo_tokens = 65536;
  CHECK_EQ(most_prepared_tiles(o, kernel), 512 + 4);
  o.max_qo_tokens = 1 << 20;
  CHECK_EQ(most_prepared_tiles(o, kernel), 1024);  // 512 MB
  o.max_qo_tokens = 511;
  CHECK_EQ(most_prepared_tiles(o, kernel), 0);  // fewer than 16 row tiles of 4 heads
  o.max_qo_tokens = 8192;
  o.window_left = 100;
  CHECK_EQ(most_prepared_tiles(o, kernel), 0);
  o.window_left = -1;
  CHECK_EQ(most_prepared_tiles(o, fake_kernel("other", {90, 'a'})), 0);
}

// A short chunk of a long prompt is prepared, too.
TEST(room_for_widened_tiles) {
  Kernel kernel = choice_for_prepared().kernel;
  kernel.geometry.prepares_some = true;
  kernel.tuning.prepare_reads = 4;
  AttentionOptions o = llama_on_gpu();
  o.max_batch_size = 129;
  o.max_qo_tokens = 128;
  CHECK_EQ(most_prepared_tiles(o, kernel), 512);  // 256 MB
  o.max_qo_tokens = 127;
  CHECK_EQ(most_prepared_tiles(o, kernel), 0);  // fewer than 4 row tiles of 4 heads
  o.max_qo_tokens = 65536;
  CHECK_EQ(most_prepared_tiles(o, kernel), 512 + 129);
}

TEST(workspace_with_prepared_tiles) {
  const KernelChoice choice = choice_for_prepared();
  AttentionOptions o = llama_on_gpu();
  o.max_batch_size = 4;
  const WorkspaceLayout all = layout_workspace(o, choice, std::nullopt);
  CHECK_EQ(all.max_prepared_tiles, 256);
  const size_t bytes = size_t{256} * 8 * 32768;
  CHECK_EQ(all.prepared_values - all.prepared_keys, bytes);
  CHECK_EQ(all.total - all.prepared_values, bytes);
  // A limit is kept: prepared tiles are given up before partial slots.
  for (const size_t missing : {size_t{1}, size_t{1} << 20, 2 * bytes - 1, 2 * bytes}) {
    const WorkspaceLayout less = layout_workspace(o, choice, all.total - missing);
    CHECK(less.total <= all.total - missing);
    CHECK_EQ(less.max_partial_slots, all.max_partial_slots);
    CHECK_EQ(less.max_prepared_tiles, 256 - static_cast<int32_t>((missing - 1) / (2 * 262144) + 1));
  }
  const WorkspaceLayout least = layout_workspace(o, choice, all.total - 2 * bytes - 1);
  CHECK_EQ(least.max_prepared_tiles, 0);
  CHECK(least.max_partial_slots < all.max_partial_slots);
}

}  // namespace
}  // namespace flashplan::test
