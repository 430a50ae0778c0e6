// SPDX-License-Identifier: Apache-2.0
// The row tiles of one batch, which are the work to be scheduled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "abi/mask.h"
#include "abi/work_queue.h"
#include "flashplan/plan.h"
#include "plan/schedule/cost_classes.h"
#include "plan/schedule/prefix_tree.h"
#include "plan/schedule/schedule_shape.h"
#include "plan/schedule/sharing_merges.h"

namespace flashplan {

/// Up to tile_q query rows of one segment, for all kv heads. A RowTile has 32 bytes; the smaller it
/// is, the faster is planning.
struct RowTile {
  int64_t head_cost;  // predicted cost of one kv head
  int32_t segment;
  int32_t row_tile;  // number of this tile in its segment
  KeySpan keys;      // keys that its rows may see, from a multiple of tile_kv on; {0, 0}: none
  uint16_t num_rows;
  uint16_t cost_class;  // CostClasses::kLast: the tile is in a group
  int32_t sharer;       // number of its request or prefix as a sharer (PrefixTree); -1: none

  bool in_group() const { return cost_class == CostClasses::kLast; }
};

/// The costs that CostModel predicts for a tile of one given number of query rows.
struct RowCosts {
  int64_t tile;
  int64_t step;
  int64_t split;
  int64_t write;
  int64_t merge;
};

/// The row tiles of one segment, if there are several. They are dealt to queues one after the
/// other, so that several CTAs read the same keys at the same time, from the cache that they share.
struct RowTileGroup {
  int32_t first;
  int32_t count;
};

/// Collects row tiles without allocating.
class RowTiles {
 public:
  /// Allocates memory for batches of up to `max_requests` requests and `max_row_tiles` row tiles.
  /// May throw std::bad_alloc.
  void reserve(const ScheduleShape& shape, int32_t max_requests, int32_t max_row_tiles);

  /// Leaves out requests of fewer than `least` or more than `most` packed query rows.
  void take_rows(int32_t least, int32_t most) noexcept {
    shape_.min_rows = least;
    shape_.max_rows = most;
  }

  /// Collects the row tiles of `batch` and of the prefixes that its requests share. Writes a
  /// segment for each request and prefix to `segments`. Writes to the memory of `sharing`, for each
  /// kv head of a prefix and of a request that reads one, a Merge: which partial results are put
  /// together.
  void collect(const Batch& batch, const PrefixTree& prefixes, Segment* segments,
               const SharingMerges& sharing);

  const RowTile& operator[](int32_t i) const { return tiles_[static_cast<std::size_t>(i)]; }
  /// The costs of a tile of up to tile_q rows. Looking them up is faster than computing them anew.
  const RowCosts& costs(int32_t rows) const { return costs_[static_cast<std::size_t>(rows)]; }
  std::span<const RowTileGroup> groups() const { return {groups_.data(), num_groups_}; }
  /// The indices of the row tiles in no group, longest first.
  std::span<const int32_t> longest_first() const { return {order_.data(), num_ordered_}; }
  /// The indices of the row tiles of prefixes, longest first, if ScheduleShape::prefixes_first().
  /// Otherwise this is empty, and longest_first() has them.
  std::span<const int32_t> prefixes_longest_first() const {
    return {order_.data() + first_prefix_, num_prefixes_};
  }
  // Predicted costs of row tiles, for all kv heads:
  int64_t total_cost() const { return total_cost_; }
  int64_t cost_of_prefixes() const { return cost_of_prefixes_; }
  /// The cost of the prefixes and of the requests that read them.
  int64_t cost_of_sharers() const { return cost_of_prefixes_ + cost_of_readers_; }

 private:
  class Collector;

  Collector collect_tiles(const Batch& batch, int32_t request, const Segment& segment,
                          Collector collector);
  RowTile* collect_prefixes(const Batch& batch, const PrefixTree& prefixes, Segment* segments,
                            SharingMergesWriter merges, RowTile* next);
  std::size_t order_by_class(int32_t first, int32_t end);

  ScheduleShape shape_;
  std::vector<RowCosts> costs_;
  // These vectors have the size that the bounds need, and the counts below say how much of them is
  // used. They do not grow by push_back(), whose check would take as long as the work itself.
  std::vector<RowTile> tiles_;
  std::vector<RowTileGroup> groups_;
  std::vector<int32_t> order_;
  CostClasses classes_;
  std::size_t num_groups_ = 0;
  std::size_t num_ordered_ = 0;
  std::size_t first_prefix_ = 0;
  std::size_t num_prefixes_ = 0;
  int64_t total_cost_ = 0;
  int64_t cost_of_prefixes_ = 0;
  int64_t cost_of_readers_ = 0;
};

}  // namespace flashplan
