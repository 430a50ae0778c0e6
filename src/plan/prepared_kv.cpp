// SPDX-License-Identifier: Apache-2.0
#include "plan/prepared_kv.h"

#include <algorithm>
#include <cstddef>

#include "plan/causal_keys.h"
#include "plan/kernel/kernel.h"
#include "plan/kernel/tuning.h"
#include "plan/schedule/division.h"
#include "plan/schedule/schedule_shape.h"
#include "plan/workspace_tuning.h"

namespace flashplan {
namespace {

/// Whether the kernel of this schedule reads keys for a request. A request of fewer rows than
/// ScheduleShape::min_rows runs on the plan's other kernel.
bool reads_keys(const ScheduleShape& shape, int32_t qo_len, int32_t kv_len) {
  return qo_len > 0 && kv_len > 0 && qo_len * shape.group_size >= shape.min_rows;
}

int32_t num_tiles_of(const ScheduleShape& shape, int32_t kv_len) {
  return ceil_divide(kv_len, shape.tile_kv);
}

/// How many row tiles of a request read a key, on average over its keys.
int64_t reads_of_key(const ScheduleShape& shape, int32_t qo_len, int32_t kv_len) {
  const int64_t rows = int64_t{qo_len} * shape.group_size;
  const int64_t row_tiles = (rows + shape.tile_q - 1) / shape.tile_q;
  if (!shape.mask.causal) return row_tiles;
  return row_tiles * mean_causal_keys(qo_len, kv_len) / kv_len;
}

/// Chooses each request whose keys are read often enough, as long as there is room for its tiles.
int32_t choose_some(const Batch& batch, const ScheduleShape& shape, int32_t max_tiles,
                    int32_t* first_tiles) {
  int32_t num_tiles = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    const int32_t qo_len = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
    const int32_t kv_len = batch.kv_lens[r];
    if (!reads_keys(shape, qo_len, kv_len)) continue;
    const int32_t own_tiles = num_tiles_of(shape, kv_len);
    if (own_tiles > max_tiles - num_tiles) continue;
    if (reads_of_key(shape, qo_len, kv_len) < shape.prepare_reads) continue;
    first_tiles[r] = num_tiles;
    num_tiles += own_tiles;
  }
  return num_tiles;
}

}  // namespace

int32_t most_prepared_tiles(const AttentionOptions& options, const Kernel& kernel) noexcept {
  const KernelGeometry& geometry = kernel.geometry;
  const int64_t bytes =
      (int64_t{geometry.prepared_key_bytes} + geometry.prepared_value_bytes) * options.num_kv_heads;
  // With a sliding window few row tiles read a key, so preparing keys would not pay.
  if (bytes == 0 || options.window_left >= 0) return 0;
  // Keys that are rotated when they are prepared round differently from keys that are rotated as
  // they are read. Whether they are prepared depends on the whole batch, and so would the results.
  if (options.batch_invariant && options.rope) return 0;
  const int64_t rows =
      int64_t{options.max_qo_tokens} * (options.num_qo_heads / options.num_kv_heads);
  if (rows < int64_t{geometry.tile_q} * kernel.tuning.prepare_reads) return 0;
  constexpr WorkspaceTuning kTuning = kWorkspaceTuning;
  const int64_t of_queries = (options.max_qo_tokens - 1) / geometry.tile_kv + 1;
  // The last tile of a request may be nearly empty, so each request may need one more tile.
  const int64_t all = of_queries + std::min<int64_t>(options.max_batch_size, of_queries);
  const int64_t enough = geometry.prepares_some
                             ? kTuning.enough_widened_bytes / bytes
                             : std::min(kTuning.prepared_keys_per_query * of_queries,
                                        kTuning.enough_prepared_bytes / bytes);
  return static_cast<int32_t>(std::max(std::min(all, kTuning.most_prepared_bytes / bytes), enough));
}

int32_t choose_prepared_kv(const Batch& batch, const ScheduleShape& shape,
                           std::span<const Segment> segments, int32_t max_tiles,
                           const PreparedTiles& tiles) noexcept {
  const auto num_requests = static_cast<std::size_t>(batch.batch_size);
  const int64_t most_reads = int64_t{shape.prepare_reads} * kPrepareTuning.most_reads_numerator /
                             kPrepareTuning.most_reads_denominator;
  int64_t num_tiles = 0;  // tiles of keys
  int64_t num_reads = 0;  // reads of all these tiles; of one tile at most most_reads are counted
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    tiles.first_tiles[r] = static_cast<int32_t>(num_tiles);
    const int32_t qo_len = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
    const int32_t kv_len = batch.kv_lens[r];
    if (!reads_keys(shape, qo_len, kv_len)) continue;
    const int32_t own_tiles = num_tiles_of(shape, kv_len);
    num_tiles += own_tiles;
    num_reads += own_tiles * std::min(reads_of_key(shape, qo_len, kv_len), most_reads);
    if (num_tiles > max_tiles) break;
  }
  const bool has_prefixes = segments.size() > num_requests;
  if (shape.prepares_some) {
    std::fill_n(tiles.first_tiles, segments.size(), kNotPrepared);
    const bool can_prepare = !has_prefixes && batch.key_ranges == nullptr;
    *tiles.num_tiles = can_prepare ? choose_some(batch, shape, max_tiles, tiles.first_tiles) : 0;
    return *tiles.num_tiles;
  }
  const bool is_worth_it = num_tiles > 0 && num_reads >= num_tiles * shape.prepare_reads;
  if (num_tiles > max_tiles || !is_worth_it || has_prefixes || batch.key_ranges != nullptr) {
    std::fill_n(tiles.first_tiles, segments.size(), kNotPrepared);
    num_tiles = 0;
  }
  *tiles.num_tiles = static_cast<int32_t>(num_tiles);
  return *tiles.num_tiles;
}

}  // namespace flashplan
