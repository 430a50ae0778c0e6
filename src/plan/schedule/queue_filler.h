// SPDX-License-Identifier: Apache-2.0
// Divides row tiles among the queues.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/schedule/cost_classes.h"
#include "plan/schedule/cutter.h"
#include "plan/schedule/row_tiles.h"
#include "plan/schedule/schedule_shape.h"

namespace flashplan {

/// The fewest kv heads that an item may have. This bounds the number of items of the largest batch,
/// and so the bytes that are copied to the device.
int32_t least_heads_per_item(const ScheduleShape& shape, int64_t max_row_tiles) noexcept;

/// The row tiles of a batch, or some of them, which are divided together.
struct TileSet {
  const RowTiles& row_tiles;
  std::span<const RowTileGroup> groups;
  std::span<const int32_t> longest_first;  // indices of the row tiles in no group
  int64_t cost;                            // predicted cost of all heads, uncut
  int32_t num_sharers;                     // number of prefixes and of requests that read them
  /// Whether what follows these tiles, the readers of prefixes or a merge, waits until the longest
  /// queue has ended. Then a cut that costs more work than it moves is made too, because it makes
  /// the longest queue shorter.
  bool queues_wait = false;
  /// > 0: the largest cost of a queue. Tiles that must be cut fill one queue after the other up to
  /// this cost, so the last queues may stay empty. If it is 0, or the tiles do not fit, all queues
  /// get about equal costs.
  int64_t capacity = 0;

  int32_t num_row_tiles() const;
  /// Of the first tile in longest_first and the last tile of each group, the one whose head costs
  /// the most. With a causal mask no row tile costs much more. nullptr: there is no row tile.
  const RowTile* longest() const;
};

/// Divides a TileSet evenly among the queues: whole items as long as they fit, then pieces of the
/// items that are left. The share is the predicted cost that each queue would get if the work could
/// be divided perfectly. The capacity is the most that a queue may get: the share and some slack,
/// because cuts add work. fill() does not allocate.
class QueueFiller {
 public:
  /// Allocates memory for the largest batch: `max_items` items before cuts, `max_work_tiles` work
  /// tiles after cuts, `max_row_tiles` row tiles of requests. May throw std::bad_alloc.
  void reserve(const ScheduleShape& shape, int32_t max_items, int32_t max_work_tiles,
               int32_t max_row_tiles);
  /// Leaves all queues but the first `num_queues` empty, from the next fill() on.
  void take_queues(int32_t num_queues);

  /// Divides `tiles` among the queues. `segments` and `sharing` are those of the batch. `loads`:
  /// the predicted cost of the work that each queue has already; empty: all queues are empty.
  void fill(const TileSet& tiles, const Segment* segments, const SharingMerges& sharing,
            std::span<const int64_t> loads = {});

  // Results of the last fill():

  /// The predicted cost of each queue, including the `loads` that fill() got.
  std::span<const int64_t> loads() const { return loads_; }
  /// The items that were not cut, each with the queue (CTA) that it was put into.
  std::span<const Item> whole() const {
    return {dealt_.data(), static_cast<std::size_t>(num_whole_)};
  }
  /// The cutter, which holds the pieces of the items that were cut.
  const Cutter& cutter() const { return cutter_; }

 private:
  class Dealer;

  void fill_queues(int64_t share, int32_t heads_at_once);
  void fill_uncut(int64_t share);
  /// Whether items that do not fit where they were dealt go, by a heap, to the least loaded queues,
  /// so that only those which fit into no queue are cut.
  bool has_heap() const { return !shape_.cuts || !tiles_->groups.empty(); }
  void place_without_cuts();
  void deal_items(int64_t share, int64_t capacity);
  void sort_left_items();
  void place_whole(int32_t first, int64_t capacity);
  int64_t place_the_rest(int64_t capacity);
  int64_t cost_of(const Item& item) const;
  int64_t first_slack(int64_t share) const;
  void reduce_slack(int64_t share, int64_t too_little, int64_t enough);
  int32_t heads_per_item(const RowTile& tile, int64_t share) const;
  int32_t heads_per_sharer() const;

  ScheduleShape shape_;
  int32_t least_heads_ = 1;         // the fewest kv heads of an item
  const TileSet* tiles_ = nullptr;  // the argument of fill(), while it runs
  std::span<const int64_t> loads_before_;
  int32_t heads_at_once_ = 1;
  Cutter cutter_;
  // These vectors have the size that the bounds need, and the counts below say how much of them is
  // used. They do not grow by push_back(), whose check would take as long as the work itself.
  std::vector<Item> dealt_;          // items that were dealt, then those that place_whole() placed
  std::vector<Item> left_;           // items that were not placed as a whole, and are cut
  std::vector<Item> sorted_;         // items that were not dealt, longest first
  std::vector<int32_t> heap_;        // CTAs, the least loaded on top
  std::vector<int64_t> loads_;       // predicted cost of each queue
  std::vector<int64_t> dealt_cost_;  // predicted cost of each queue after items were dealt
  CostClasses classes_;
  int32_t num_dealt_ = 0;
  int32_t num_whole_ = 0;  // items that were dealt or placed as a whole
  int32_t num_left_ = 0;
  int32_t num_sorted_ = 0;
};

}  // namespace flashplan
