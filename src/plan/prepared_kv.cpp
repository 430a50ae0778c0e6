// SPDX-License-Identifier: Apache-2.0
#include "plan/prepared_kv.h"

#include <algorithm>
#include <cstddef>

#include "plan/division.h"
#include "plan/kernel.h"
#include "plan/schedule_shape.h"

namespace flashplan {
namespace {

/// For fewer reads of tiles by all row tiles together, the launch takes longer than it saves.
constexpr int64_t kLeastReads = 2048;

/// How many row tiles of a request read a key, at the mean over its keys.
int64_t reads_of_key(const ScheduleShape& shape, int32_t qo_len, int32_t kv_len) {
  const int64_t rows = int64_t{qo_len} * shape.group_size;
  const int64_t row_tiles = (rows + shape.tile_q - 1) / shape.tile_q;
  if (!shape.mask.causal) return row_tiles;
  // All queries see the keys before the first one's position, and half of them see the others.
  const int64_t seen = std::max(int64_t{kv_len} - qo_len / 2, int64_t{kv_len} / 2);
  return row_tiles * seen / kv_len;
}

}  // namespace

int32_t most_prepared_tiles(const AttentionOptions& options, const Kernel& kernel) noexcept {
  const KernelGeometry& geometry = kernel.geometry;
  const int64_t bytes =
      (int64_t{geometry.prepared_key_bytes} + geometry.prepared_value_bytes) * options.num_kv_heads;
  // Behind a window few row tiles read a key.
  if (bytes == 0 || options.window_left >= 0) return 0;
  const int64_t rows =
      int64_t{options.max_qo_tokens} * (options.num_qo_heads / options.num_kv_heads);
  const int64_t least_rows = int64_t{geometry.tile_q} * kernel.tuning.prepare_reads;
  if (rows < least_rows) return 0;
  // There is room for as many keys as there are queries, and for more keys before these.
  constexpr int64_t kKeysPerQuery = 4;
  constexpr int64_t kEnoughBytes = int64_t{64} << 20;
  constexpr int64_t kMostBytes = int64_t{512} << 20;
  const int64_t of_queries = (options.max_qo_tokens - 1) / geometry.tile_kv + 1;
  const int64_t wanted = std::max(std::min(of_queries, kMostBytes / bytes),
                                  std::min(kKeysPerQuery * of_queries, kEnoughBytes / bytes));
  // The last tile of each request may be nearly empty.
  return static_cast<int32_t>(wanted +
                              std::min<int64_t>(options.max_batch_size, rows / least_rows));
}

int32_t choose_prepared_kv(const Batch& batch, const ScheduleShape& shape,
                           std::span<const Segment> segments, int32_t max_tiles,
                           const PreparedTiles& tiles) noexcept {
  std::fill_n(tiles.first_tiles, segments.size(), kNotPrepared);
  *tiles.num_tiles = 0;
  if (max_tiles == 0 || batch.key_ranges != nullptr) return 0;
  int32_t num_tiles = 0;
  int64_t num_reads = 0;  // of tiles
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    const int32_t qo_len = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
    const int32_t kv_len = batch.kv_lens[r];
    if (qo_len == 0 || kv_len == 0) continue;
    const int64_t reads = reads_of_key(shape, qo_len, kv_len);
    const int32_t own_tiles = ceil_divide(kv_len, shape.tile_kv);
    if (reads < shape.prepare_reads || own_tiles > max_tiles - num_tiles) continue;
    tiles.first_tiles[r] = num_tiles;
    std::fill_n(tiles.requests + num_tiles, own_tiles, r);
    num_tiles += own_tiles;
    num_reads += own_tiles * reads;
  }
  if (num_reads * shape.num_kv_heads < kLeastReads) {
    std::fill_n(tiles.first_tiles, segments.size(), kNotPrepared);
    return 0;
  }
  *tiles.num_tiles = num_tiles;
  return num_tiles;
}

}  // namespace flashplan
