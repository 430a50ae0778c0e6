// SPDX-License-Identifier: Apache-2.0
// The row tiles of one step, which the scheduler divides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "abi/mask.h"
#include "abi/work_queue.h"
#include "flashplan/plan.h"
#include "plan/cost_classes.h"
#include "plan/prefix_tree.h"
#include "plan/schedule_shape.h"

namespace flashplan {

/// Up to tile_q query rows of one segment, for all kv heads. It has only 32 bytes, because the time
/// of planning depends on the size of its tables.
struct RowTile {
  int64_t head_cost;  // predicted for one kv head
  int32_t segment;
  int32_t row_tile;  // number in the segment
  KeySpan keys;      // that its rows see, rounded down to the begin of a step; {0, 0}: none
  uint16_t num_rows;
  uint16_t cost_class;  // CostClasses::kLast: the row tile is in a group
  int32_t sharer;       // number as a sharer, see PrefixTree; -1: none

  bool in_group() const { return cost_class == CostClasses::kLast; }
};

/// The row tiles of one segment, if there are several and CTAs share a cache.
struct RowTileGroup {
  int32_t first;
  int32_t count;
};

/// Collects row tiles without allocating.
class RowTiles {
 public:
  /// Allocates for batches of up to `max_requests` with up to `max_row_tiles`. May throw
  /// std::bad_alloc.
  void reserve(const ScheduleShape& shape, int32_t max_requests, int32_t max_row_tiles);

  /// Collects the row tiles of `batch` and of the prefixes that its requests share, and writes the
  /// segments of both.
  void collect(const Batch& batch, const PrefixTree& prefixes, Segment* segments);

  const RowTile& operator[](int32_t i) const { return tiles_[static_cast<std::size_t>(i)]; }
  std::span<const RowTileGroup> groups() const { return {groups_.data(), num_groups_}; }
  /// The row tiles of requests that are in no group, by number.
  std::span<const int32_t> longest_first() const { return {order_.data(), num_ordered_}; }
  /// The row tiles of shared prefixes, by number.
  std::span<const int32_t> prefixes_longest_first() const {
    return {order_.data() + num_of_requests_, num_of_prefixes_};
  }
  /// Predicted costs, for all heads.
  int64_t cost_of_requests() const { return cost_of_requests_; }
  int64_t cost_of_prefixes() const { return cost_of_prefixes_; }

 private:
  void collect_prefixes(const Batch& batch, const PrefixTree& prefixes, Segment* segments);

  ScheduleShape shape_;
  // These have the size of the bounds, and are used up to the counts below: the check in push_back
  // would take as long as the work.
  std::vector<RowTile> tiles_;
  std::vector<RowTileGroup> groups_;
  std::vector<int32_t> order_;
  CostClasses classes_;
  std::size_t num_groups_ = 0;
  std::size_t num_ordered_ = 0;
  std::size_t num_of_requests_ = 0;
  std::size_t num_of_prefixes_ = 0;
  int64_t cost_of_requests_ = 0;
  int64_t cost_of_prefixes_ = 0;
};

}  // namespace flashplan
