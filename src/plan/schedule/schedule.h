// SPDX-License-Identifier: Apache-2.0
// The scheduler turns the lengths of a batch into balanced work queues. It is integer code that
// runs on the CPU.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "abi/work_queue.h"
#include "flashplan/plan.h"
#include "flashplan/schedule.h"
#include "plan/prepared_kv.h"
#include "plan/schedule/prefix_tree.h"
#include "plan/schedule/queue_filler.h"
#include "plan/schedule/row_tiles.h"
#include "plan/schedule/schedule_shape.h"

namespace flashplan {

/// Upper bounds of the sizes of a schedule, for any batch within max_batch_size and max_qo_tokens.
struct ScheduleBounds {
  int32_t requests;
  int32_t segments;   // requests and shared prefixes
  int32_t row_tiles;  // row tiles of all segments
  int32_t items;      // items before any is cut; an item is some kv heads of a row tile
  int32_t work_tiles;
  int32_t merges;
  int32_t mask_begins = 0;     // entries of mask_begins; set by callers whose plans have masks
  int32_t prepared_tiles = 0;  // prepared tiles; set by callers whose plans prepare keys
};
ScheduleBounds schedule_bounds(const ScheduleShape& shape, int32_t max_batch_size,
                               int32_t max_qo_tokens);
/// Bounds with room for any schedule within `a` or within `b`.
ScheduleBounds larger(const ScheduleBounds& a, const ScheduleBounds& b);

/// The memory that a schedule is written to, with room for its bounds. Its owner keeps it until the
/// schedule is no longer used.
struct ScheduleMemory {
  Segment* segments = nullptr;
  Merge* merges = nullptr;
  WorkTile* tiles = nullptr;
  int32_t merges_taken = 0;  // merges at the end of `merges` that the plan's other kernel uses
  // The scheduler's caller writes these:
  int32_t* mask_begins = nullptr;  // [requests]
  PreparedTiles prepared = {};
};

/// Allocates and owns the memory of a schedule. May throw std::bad_alloc.
class ScheduleBuffers {
 public:
  ScheduleBuffers() = default;
  explicit ScheduleBuffers(const ScheduleBounds& bounds)
      : segments_(static_cast<std::size_t>(bounds.segments)),
        merges_(static_cast<std::size_t>(bounds.merges)),
        tiles_(static_cast<std::size_t>(bounds.work_tiles)),
        mask_begins_(static_cast<std::size_t>(bounds.mask_begins)) {}

  ScheduleMemory memory() {
    return {.segments = segments_.data(),
            .merges = merges_.data(),
            .tiles = tiles_.data(),
            .mask_begins = mask_begins_.data()};
  }
  const int32_t* mask_begins() const { return mask_begins_.data(); }

 private:
  std::vector<Segment> segments_;
  std::vector<Merge> merges_;
  std::vector<WorkTile> tiles_;
  std::vector<int32_t> mask_begins_;
};

/// The work queues of a batch: CTA c runs tiles [cta_indptr[c], cta_indptr[c + 1]) in order.
struct Schedule {
  std::span<const Segment> segments;
  std::span<const WorkTile> tiles;
  std::span<const Merge> merges;
  std::vector<int32_t> cta_indptr;
  std::vector<int64_t> cta_cost;  // predicted cost of each CTA
  std::span<const SharedPrefix>
      prefixes;                  // computed once; their segments come after those of requests
  int64_t total_cost = 0;        // predicted cost of all row tiles, uncut
  int64_t saved_cost = 0;        // how much sharing prefixes lowers total_cost
  int32_t first_merge = 0;       // the number that work tiles have for merges[0]
  int32_t num_cut = 0;           // number of heads of row tiles that are cut
  int32_t num_partial_rows = 0;  // rows of partial results (o, lse) in use

  int32_t num_ctas() const noexcept { return static_cast<int32_t>(cta_cost.size()); }
};

/// Makes schedules without allocating.
class Scheduler {
 public:
  /// Allocates memory for batches within the bounds. May throw std::bad_alloc.
  void reserve(const ScheduleShape& shape, const ScheduleBounds& bounds);

  /// Leaves requests of fewer than `least` or more than `most` packed query rows out of the next
  /// schedules.
  void take_rows(int32_t least, int32_t most) noexcept;

  /// Leaves all queues but the first `num_queues` empty in the next schedules. `num_queues` is at
  /// most ScheduleShape::num_ctas of reserve(), and equal to it for batches with shared prefixes.
  void take_queues(int32_t num_queues) noexcept { shape_.num_ctas = num_queues; }

  /// Writes the schedule of `batch` to `memory`. The batch must have been validated against the
  /// bounds. All requests of a group begin with the group's prefix. A schedule that shares prefixes
  /// computes attention over such a prefix once for all of its requests.
  ///
  /// make() first builds a schedule that shares prefixes. If this schedule shares at least one
  /// prefix and gains_by_prefixes() is false, make() then builds a schedule that shares none, in
  /// the same memory, and compares the predicted times of the two. If the first schedule takes less
  /// time, make() builds it again, because the second one has overwritten it. To build a schedule,
  /// QueueFiller tries several capacities of the queues.
  void make(const Batch& batch, std::span<const PrefixGroup> groups, const ScheduleMemory& memory);

  const Schedule& schedule() const noexcept { return schedule_; }
  const ScheduleShape& shape() const noexcept { return shape_; }
  /// Whether the last schedule shares prefixes and is sure to gain by it: its predicted time is at
  /// most that of a schedule without sharing whose work is divided perfectly among the queues.
  bool gains_by_prefixes() const noexcept { return gains_by_prefixes_; }

 private:
  void schedule_batch(const Batch& batch);
  /// The end of the merges that the current schedule may use.
  int32_t merges_end() const { return max_merges_ - memory_.merges_taken; }
  void divide();
  struct LittleWork {
    int32_t num_queues;  // the first num_queues queues get work, the others stay empty
    bool queues_wait;    // TileSet::queues_wait: queues wait until the longest one has ended
  };
  LittleWork little_work(const TileSet& tiles) const;
  int64_t capacity_of_prefixes() const;
  std::span<const int64_t> loads_of_prefixes();
  int64_t modelled_time() const;
  bool has_prefixes_first() const { return shape_.prefixes_first() && !prefixes_.empty(); }
  void write_queues();
  template <class Selects>
  void write_whole(std::span<const Item> items, int32_t* next_whole, Selects selects) const;

  ScheduleShape shape_;
  ScheduleMemory memory_;
  int32_t max_merges_ = 0;
  Schedule schedule_;
  PrefixTree prefixes_;
  bool gains_by_prefixes_ = false;
  SharingMerges sharing_;
  RowTiles row_tiles_;
  QueueFiller prefix_filler_;  // divides the prefixes, if they come first in the queues
  QueueFiller filler_;
  // For each queue, the index in ScheduleMemory::tiles at which write_whole() writes the next uncut
  // item of prefix_filler_ (next_whole_prefix_) or of filler_ (next_whole_).
  std::vector<int32_t> next_whole_prefix_;
  std::vector<int32_t> next_whole_;
  // One entry for each queue, and all entries are the cost of the longest queue:
  // loads_of_prefixes() returns them where all queues are to count as equally loaded.
  std::vector<int64_t> prefix_loads_;
};

}  // namespace flashplan
