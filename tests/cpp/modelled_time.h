// SPDX-License-Identifier: Apache-2.0
// Runs a schedule without arithmetic, and says when the last CTA ends by the cost model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "plan/schedule/schedule.h"
#include "slow_planner.h"

namespace flashplan::test {

/// Simulates a run by the cost model: all CTAs start at time 0, and each computes the work tiles of
/// its queue in order. Of CTAs that end a tile at the same time, the one with the smaller number
/// arrives first. On a GPU a CTA that ends a work tile of a request waits for its prefixes. The
/// kernel of sm90 waits only when its queue has ended, which this model leaves out.
class ModelledRun {
 public:
  ModelledRun(const Schedule& schedule, const ScheduleShape& shape) : s_(schedule), shape_(shape) {}

  /// The time at which the last CTA ends; without end if CTAs wait for each other.
  int64_t time() {
    using Event = std::pair<int64_t, int32_t>;  // end of a tile, CTA
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
    std::vector<int32_t> next(s_.cta_indptr.begin(), s_.cta_indptr.end() - 1);
    const auto start = [&](int32_t cta, int64_t now) {
      const auto c = static_cast<size_t>(cta);
      if (next[c] == s_.cta_indptr[c + 1]) return;
      events.emplace(now + tile_time(s_.tiles[static_cast<size_t>(next[c])]), cta);
    };
    arrivals_.assign(s_.merges.size(), 0);
    for (int32_t cta = 0; cta < s_.num_ctas(); ++cta) start(cta, 0);
    std::vector<int32_t> waiting;
    int64_t last = 0;
    while (!events.empty()) {
      auto [now, cta] = events.top();
      events.pop();
      const WorkTile& tile = s_.tiles[static_cast<size_t>(next[static_cast<size_t>(cta)])];
      if (waits(tile)) {
        waiting.push_back(cta);
        continue;
      }
      ++next[static_cast<size_t>(cta)];
      const int64_t end = now;
      prefix_ends_ = false;
      for (int32_t h = 0; tile.merge >= 0 && h < tile.num_kv_heads; ++h) {
        const int64_t before = now;
        arrive(tile.merge + h, &now);
        most_merging_ = std::max(most_merging_, now - before);
      }
      if (prefix_ends_) {
        for (const int32_t other : waiting) events.emplace(end, other);  // which looks again
        waiting.clear();
      }
      last = std::max(last, now);
      start(cta, now);
    }
    return waiting.empty() ? last : std::numeric_limits<int64_t>::max();
  }
  /// The longest time for which one CTA merged after one work tile of one head.
  int64_t most_merging() const { return most_merging_; }

 private:
  int64_t tile_time(const WorkTile& tile) const {
    const Segment& segment = s_.segments[static_cast<size_t>(tile.segment)];
    const int32_t rows =
        std::min(shape_.tile_q, segment.qo_len * shape_.group_size - tile.row_tile * shape_.tile_q);
    int64_t time = slow_cost(shape_, rows, tile.kv_end - tile.kv_begin);
    if (tile.merge >= 0) {
      const Merge& of = merge(tile.merge);
      const bool shares = of.parent >= 0 || of.num_readers > 0;
      time += shares ? shape_.cost.write + int64_t{shape_.cost.write_row} * rows
                     : slow_split_cost(shape_, rows);
    }
    return time * tile.num_kv_heads;
  }

  /// Whether a prefix of the tile's request has not arrived at its merges.
  bool waits(const WorkTile& tile) const {
    if (!shape_.prefixes_first() || tile.merge < 0 || merge(tile.merge).num_readers > 0) {
      return false;
    }
    for (int32_t h = 0; h < tile.num_kv_heads; ++h) {
      for (int32_t m = merge(tile.merge + h).parent; m >= 0; m = merge(m).parent) {
        if (arrivals_of(m) < merge(m).num_pieces) return true;
      }
    }
    return false;
  }

  int32_t arrivals_of(int32_t number) const {
    return arrivals_[static_cast<size_t>(number - s_.first_merge)];
  }
  const Merge& merge(int32_t number) const {
    return s_.merges[static_cast<size_t>(number - s_.first_merge)];
  }

  void arrive(int32_t number, int64_t* now) {
    const Merge& of = merge(number);
    if (++arrivals_[static_cast<size_t>(number - s_.first_merge)] != of.num_pieces) return;
    if (of.num_readers > 0) prefix_ends_ = true;
    for (int32_t i = 0; i < of.num_readers; ++i) {
      arrive(of.first_reader + i * of.reader_step, now);
    }
    // Merging pieces of one row tile is a part of CostModel::split.
    if (of.num_readers == 0 && of.parent >= 0) {
      *now += shape_.cost.merge + int64_t{shape_.cost.merge_row} * of.rows.num_rows;
    }
  }

  const Schedule& s_;
  const ScheduleShape& shape_;
  std::vector<int32_t> arrivals_;
  int64_t most_merging_ = 0;
  bool prefix_ends_ = false;  // at this event
};

}  // namespace flashplan::test
