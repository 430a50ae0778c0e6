// SPDX-License-Identifier: Apache-2.0
// Which keys are prepared: those that many row tiles read, as far as there is room for them.
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "check.h"
#include "fake_devices.h"
#include "plan/kernel.h"
#include "plan/prepared_kv.h"
#include "plan/schedule_shape.h"
#include "plan/workspace_layout.h"
#include "random_batch.h"

namespace flashplan::test {
namespace {

/// Prepared tiles of 128 keys, and row tiles of 128 rows.
ScheduleShape shape_of(int32_t prepare_reads, int32_t group_size = 4, int32_t num_kv_heads = 8) {
  ScheduleShape shape;
  shape.num_kv_heads = num_kv_heads;
  shape.group_size = group_size;
  shape.tile_q = shape.tile_kv = 128;
  shape.prepare_reads = prepare_reads;
  return shape;
}

/// A batch, and what is prepared of it.
struct Prepared {
  std::vector<int32_t> qo_indptr = {0};
  std::vector<int32_t> kv_lens;
  Batch batch;
  std::vector<int32_t> first_tiles;
  int32_t num_tiles = -1;
  std::vector<int32_t> requests;

  Prepared(const std::vector<int32_t>& qo_lens, std::vector<int32_t> lens)
      : kv_lens(std::move(lens)) {
    for (const int32_t qo_len : qo_lens) qo_indptr.push_back(qo_indptr.back() + qo_len);
    batch.qo_indptr = qo_indptr.data();
    batch.kv_lens = kv_lens.data();
    batch.batch_size = static_cast<int32_t>(kv_lens.size());
  }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  /// With one segment after those of the requests.
  Prepared& choose(const ScheduleShape& shape, int32_t max_tiles) {
    const std::vector<Segment> segments(kv_lens.size() + 1);
    first_tiles.assign(segments.size(), 77);
    requests.assign(static_cast<size_t>(max_tiles) + 1, 77);
    const int32_t count = choose_prepared_kv(batch, shape, segments, max_tiles,
                                             {first_tiles.data(), &num_tiles, requests.data()});
    CHECK_EQ(count, num_tiles);
    CHECK_EQ(first_tiles.back(), kNotPrepared);
    CHECK_EQ(requests.back(), 77);
    return *this;
  }
};

TEST(keys_that_many_row_tiles_read) {
  // 4096 queries of 4 heads are 128 row tiles, of which a key is read by 64.
  Prepared prompt({4096}, {4096});
  CHECK_EQ(prompt.choose(shape_of(64), 100).num_tiles, 32);
  CHECK_EQ(prompt.first_tiles[0], 0);
  CHECK_EQ(prompt.choose(shape_of(65), 100).num_tiles, 0);
  CHECK_EQ(prompt.first_tiles[0], kNotPrepared);
  // Without a causal mask all of them read it.
  ScheduleShape full = shape_of(128);
  full.mask.causal = false;
  CHECK_EQ(prompt.choose(full, 100).num_tiles, 32);
  full.prepare_reads = 129;
  CHECK_EQ(prompt.choose(full, 100).num_tiles, 0);
  // A chunk at the end of a long request: 16 row tiles read nearly all of its keys.
  Prepared chunk({512}, {8000});
  CHECK_EQ(chunk.choose(shape_of(15), 100).num_tiles, 63);
  CHECK_EQ(chunk.choose(shape_of(16), 100).num_tiles, 0);
  // More queries than keys: half of the keys are seen at the mean.
  Prepared short_keys({4096}, {100});
  CHECK_EQ(short_keys.choose(shape_of(64, 4, 64), 100).num_tiles, 1);
}

TEST(requests_without_queries_or_keys) {
  Prepared batch({0, 4096, 4096, 1}, {5000, 0, 4096, 9000});
  CHECK_EQ(batch.choose(shape_of(6), 100).num_tiles, 32);
  CHECK_EQ(batch.first_tiles[0], kNotPrepared);
  CHECK_EQ(batch.first_tiles[1], kNotPrepared);
  CHECK_EQ(batch.first_tiles[2], 0);
  CHECK_EQ(batch.first_tiles[3], kNotPrepared);
  CHECK_EQ(batch.requests[31], 2);
}

TEST(too_little_work_for_a_launch) {
  // Of 8 heads, 8 tiles that 16 row tiles read are 1024 reads.
  Prepared one({1024}, {1024});
  CHECK_EQ(one.choose(shape_of(6), 100).num_tiles, 0);
  CHECK_EQ(one.first_tiles[0], kNotPrepared);
  Prepared two({1024, 1024}, {1024, 1024});
  CHECK_EQ(two.choose(shape_of(6), 100).num_tiles, 16);
}

TEST(requests_for_which_there_is_no_room) {
  Prepared batch({4096, 4096, 2048}, {4096, 4097, 2048});
  CHECK_EQ(batch.choose(shape_of(6), 50).num_tiles, 48);
  CHECK_EQ(batch.first_tiles[0], 0);
  CHECK_EQ(batch.first_tiles[1], kNotPrepared);  // 33 tiles
  CHECK_EQ(batch.first_tiles[2], 32);
  CHECK_EQ(batch.choose(shape_of(6), 0).num_tiles, 0);
}

TEST(ranges_of_keys_prepare_none) {
  Prepared batch({4096}, {4096});
  const std::vector<int32_t> ranges(2 * 4096);
  batch.batch.key_ranges = ranges.data();
  CHECK_EQ(batch.choose(shape_of(6), 100).num_tiles, 0);
}

TEST(tiles_of_a_request_are_neighbours) {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    std::vector<int32_t> qo_lens;
    std::vector<int32_t> kv_lens;
    for (int32_t r = random.between(1, 20); r > 0; --r) {
      qo_lens.push_back(random.between(0, 3000));
      kv_lens.push_back(qo_lens.back() + random.between(0, 3000));
    }
    Prepared batch(qo_lens, kv_lens);
    batch.choose(shape_of(random.between(1, 40)), random.between(0, 300));
    int32_t next = 0;
    for (size_t r = 0; r < qo_lens.size(); ++r) {
      if (batch.first_tiles[r] == kNotPrepared) continue;
      CHECK_EQ(batch.first_tiles[r], next);
      const int32_t end = next + (kv_lens[r] + 127) / 128;
      for (; next < end; ++next) {
        CHECK_EQ(batch.requests[static_cast<size_t>(next)], static_cast<int32_t>(r));
      }
    }
    CHECK_EQ(next, batch.num_tiles);
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
  o.max_qo_tokens = 2000;                                // 16 tiles
  CHECK_EQ(most_prepared_tiles(o, kernel), 4 * 16 + 3);  // 8000 rows are 3 times what is needed
  o.max_qo_tokens = 8192;
  CHECK_EQ(most_prepared_tiles(o, kernel), 128 + 4);  // 64 MB
  o.max_qo_tokens = 65536;
  CHECK_EQ(most_prepared_tiles(o, kernel), 512 + 4);
  o.max_qo_tokens = 1 << 20;
  CHECK_EQ(most_prepared_tiles(o, kernel), 1024 + 4);  // 512 MB
  o.max_qo_tokens = 511;
  CHECK_EQ(most_prepared_tiles(o, kernel), 0);  // fewer than 16 row tiles of 4 heads
  o.max_qo_tokens = 8192;
  o.window_left = 100;
  CHECK_EQ(most_prepared_tiles(o, kernel), 0);
  o.window_left = -1;
  CHECK_EQ(most_prepared_tiles(o, fake_kernel("other", {90, 'a'})), 0);
}

TEST(workspace_with_prepared_tiles) {
  const KernelChoice choice = choice_for_prepared();
  AttentionOptions o = llama_on_gpu();
  o.max_batch_size = 4;
  const WorkspaceLayout all = layout_workspace(o, choice, std::nullopt);
  CHECK_EQ(all.max_prepared_tiles, 128 + 4);
  const size_t bytes = size_t{132} * 8 * 32768;
  CHECK_EQ(all.prepared_values - all.prepared_keys, bytes);
  CHECK_EQ(all.total - all.prepared_values, bytes);
  // A limit is kept: prepared tiles are given up before partial slots.
  for (const size_t missing : {size_t{1}, size_t{1} << 20, 2 * bytes - 1, 2 * bytes}) {
    const WorkspaceLayout less = layout_workspace(o, choice, all.total - missing);
    CHECK(less.total <= all.total - missing);
    CHECK_EQ(less.max_partial_slots, all.max_partial_slots);
    CHECK_EQ(less.max_prepared_tiles, 132 - static_cast<int32_t>((missing - 1) / (2 * 262144) + 1));
  }
  const WorkspaceLayout least = layout_workspace(o, choice, all.total - 2 * bytes - 1);
  CHECK_EQ(least.max_prepared_tiles, 0);
  CHECK(least.max_partial_slots < all.max_partial_slots);
}

}  // namespace
}  // namespace flashplan::test
