// SPDX-License-Identifier: Apache-2.0
// An independent planner, slow and plain, which tests and the fuzzer compare with. It decides
// visibility for every row and key, and follows Algorithm 1 of the FlashInfer paper line by line.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "plan/schedule/schedule.h"

namespace flashplan::test {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The rule of the mask, as the public header states it.
inline bool is_visible(const ScheduleShape& shape, int64_t qo_len, int64_t kv_len, int64_t query,
                       int64_t key) {
  const int64_t diagonal = query + kv_len - qo_len;
  if (key < 0 || key >= kv_len) return false;
  if (shape.mask.causal && key > diagonal) return false;
  return shape.mask.window_left < 0 || key >= diagonal - shape.mask.window_left;
}

/// Keys [begin, end) that one query sees; {0, 0} if it sees none. Visible keys are consecutive.
struct RowKeys {
  int64_t begin = 0;
  int64_t end = 0;
};

inline RowKeys slow_row_keys(const ScheduleShape& shape, int64_t qo_len, int64_t kv_len,
                             int64_t query) {
  int64_t begin = 0;
  while (begin < kv_len && !is_visible(shape, qo_len, kv_len, query, begin)) ++begin;
  if (begin == kv_len) return {};
  int64_t end = begin;
  while (is_visible(shape, qo_len, kv_len, query, end)) ++end;
  return {begin, end};
}

/// The same in one step, for long requests.
inline RowKeys row_keys(const ScheduleShape& shape, int64_t qo_len, int64_t kv_len, int64_t query) {
  const int64_t diagonal = query + kv_len - qo_len;
  const int64_t end = shape.mask.causal ? std::min(kv_len, diagonal + 1) : kv_len;
  const int64_t begin =
      shape.mask.window_left < 0 ? 0 : std::max<int64_t>(0, diagonal - shape.mask.window_left);
  if (begin >= end) return {};
  return {begin, end};
}

/// A row tile of one kv head: its rows and the steps of keys that any of its rows sees.
struct SlowRowTile {
  int32_t request = 0;
  int32_t row_tile = 0;
  int64_t num_rows = 0;
  int64_t kv_begin = 0;
  int64_t kv_end = 0;
};

inline std::vector<SlowRowTile> slow_row_tiles(const ScheduleShape& shape, const Batch& batch) {
  std::vector<SlowRowTile> tiles;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    const int64_t qo_len = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
    const int64_t rows = qo_len * shape.group_size;
    if (rows < shape.min_rows || rows > shape.max_rows) continue;
    for (int64_t first = 0; first < rows; first += shape.tile_q) {
      const int64_t last = std::min(first + shape.tile_q, rows) - 1;
      SlowRowTile tile{r, static_cast<int32_t>(first / shape.tile_q), last - first + 1, 0, 0};
      for (int64_t query = first / shape.group_size; query <= last / shape.group_size; ++query) {
        RowKeys keys = row_keys(shape, qo_len, batch.kv_lens[r], query);
        if (batch.key_ranges != nullptr) {
          const int32_t* range = batch.key_ranges + 2 * (batch.qo_indptr[r] + query);
          keys = {std::max<int64_t>(keys.begin, range[0]), std::min<int64_t>(keys.end, range[1])};
        }
        if (keys.begin >= keys.end) continue;
        const bool is_first = tile.kv_begin == tile.kv_end;
        tile.kv_begin = is_first ? keys.begin : std::min(tile.kv_begin, keys.begin);
        tile.kv_end = std::max(tile.kv_end, keys.end);
      }
      tile.kv_begin -= tile.kv_begin % shape.tile_kv;
      tiles.push_back(tile);
    }
  }
  return tiles;
}

inline int64_t slow_cost(const ScheduleShape& shape, int64_t rows, int64_t keys) {
  const CostModel& cost = shape.cost;
  const int64_t steps = ceil_div(keys, shape.tile_kv);
  return cost.tile + cost.tile_row * rows + steps * (cost.step + cost.step_row * rows);
}

inline int64_t slow_split_cost(const ScheduleShape& shape, int64_t rows) {
  return shape.cost.split + shape.cost.split_row * rows;
}

/// The cost of the most loaded CTA after Algorithm 1. Line numbers are the paper's.
inline int64_t slow_makespan(const ScheduleShape& shape, const Batch& batch) {
  const std::vector<SlowRowTile> row_tiles = slow_row_tiles(shape, batch);
  int64_t total_keys = 0;
  for (const SlowRowTile& tile : row_tiles) {
    total_keys += (tile.kv_end - tile.kv_begin) * shape.num_kv_heads;
  }
  // Line 3, up to whole steps.
  const int64_t chunk =
      std::max<int64_t>(1, ceil_div(ceil_div(total_keys, shape.num_ctas), shape.tile_kv)) *
      shape.tile_kv;

  std::vector<int64_t> work;  // line 4
  for (const SlowRowTile& tile : row_tiles) {
    for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
      const int64_t keys = tile.kv_end - tile.kv_begin;
      if (keys <= chunk) {
        work.push_back(slow_cost(shape, tile.num_rows, keys));
        continue;
      }
      for (int64_t begin = 0; begin < keys; begin += chunk) {
        const int64_t length = std::min(chunk, keys - begin);
        work.push_back(slow_cost(shape, tile.num_rows, length) +
                       slow_split_cost(shape, tile.num_rows));
      }
    }
  }
  std::sort(work.begin(), work.end(), std::greater<>());  // line 5

  using Entry = std::pair<int64_t, int32_t>;  // cost, CTA
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
  for (int32_t cta = 0; cta < shape.num_ctas; ++cta) queue.push({0, cta});  // line 6
  int64_t makespan = 0;
  for (const int64_t cost : work) {  // lines 7 to 13
    const auto [current, cta] = queue.top();
    queue.pop();
    queue.push({current + cost, cta});
    makespan = std::max(makespan, current + cost);
  }
  return makespan;
}

/// The largest acceptable cost of a queue: that of Algorithm 1 and 1/8 more, and a few tiles,
/// because a cut costs the fixed part of a tile, and a queue may miss its share by a step and a
/// cut.
inline int64_t acceptable_makespan(const ScheduleShape& shape, int64_t slow) {
  return slow + slow / 8 + 3 * slow_cost(shape, shape.tile_q, shape.tile_kv) +
         2 * slow_split_cost(shape, shape.tile_q);
}

}  // namespace flashplan::test
