// SPDX-License-Identifier: Apache-2.0
// The scheduler: turns the lengths of one step into balanced work queues. Integer code, no CUDA.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "abi/work_queue.h"
#include "flashplan/plan.h"
#include "flashplan/schedule.h"
#include "plan/prefix_tree.h"
#include "plan/queue_filler.h"
#include "plan/row_tiles.h"
#include "plan/schedule_shape.h"

namespace flashplan {

/// Upper bounds of a schedule for any batch within (max_batch_size, max_qo_tokens).
struct ScheduleBounds {
  int32_t requests;
  int32_t segments;   // of requests and of shared prefixes
  int32_t row_tiles;  // (segment, row tile) pairs
  int32_t items;      // before cuts; see Item
  int32_t work_tiles;
  int32_t merges;
  int32_t mask_begins = 0;  // set by the caller, for plans with masks
};
ScheduleBounds schedule_bounds(const ScheduleShape& shape, int32_t max_batch_size,
                               int32_t max_qo_tokens);

/// The memory that a schedule is written to, of the size of its bounds. Its owner keeps it as long
/// as the schedule is used.
struct ScheduleMemory {
  Segment* segments = nullptr;
  Merge* merges = nullptr;
  WorkTile* tiles = nullptr;
  int32_t* mask_begins = nullptr;  // [requests], not written by the scheduler
};

/// Allocates this memory. May throw std::bad_alloc.
class ScheduleBuffers {
 public:
  ScheduleBuffers() = default;
  explicit ScheduleBuffers(const ScheduleBounds& bounds)
      : segments_(static_cast<std::size_t>(bounds.segments)),
        merges_(static_cast<std::size_t>(bounds.merges)),
        tiles_(static_cast<std::size_t>(bounds.work_tiles)),
        mask_begins_(static_cast<std::size_t>(bounds.mask_begins)) {}

  ScheduleMemory memory() {
    return {segments_.data(), merges_.data(), tiles_.data(), mask_begins_.data()};
  }
  const int32_t* mask_begins() const { return mask_begins_.data(); }

 private:
  std::vector<Segment> segments_;
  std::vector<Merge> merges_;
  std::vector<WorkTile> tiles_;
  std::vector<int32_t> mask_begins_;
};

/// Work queues: CTA c runs tiles [cta_indptr[c], cta_indptr[c + 1]) in order.
struct Schedule {
  std::span<const Segment> segments;
  std::span<const WorkTile> tiles;
  std::span<const Merge> merges;
  std::vector<int32_t> cta_indptr;
  std::vector<int64_t> cta_cost;           // predicted cost of each queue
  std::span<const SharedPrefix> prefixes;  // computed once; their segments follow those of requests
  int64_t total_cost = 0;                  // predicted for all row tiles, without cuts
  int64_t saved_cost = 0;                  // by which sharing prefixes lowers total_cost
  int32_t first_merge = 0;                 // the number of merges[0]
  int32_t num_cut = 0;                     // heads of row tiles that are cut
  int32_t num_partial_rows = 0;            // in use

  int32_t num_ctas() const noexcept { return static_cast<int32_t>(cta_cost.size()); }
};

/// Makes schedules without allocating.
class Scheduler {
 public:
  /// Allocates for batches within the bounds. May throw std::bad_alloc.
  void reserve(const ScheduleShape& shape, const ScheduleBounds& bounds);

  /// Writes the schedule of `batch`, which has been checked against the bounds, to `memory`.
  /// Prefixes of `groups` are computed once, unless that makes the longest queue longer.
  void make(const Batch& batch, std::span<const PrefixGroup> groups, const ScheduleMemory& memory);

  const Schedule& schedule() const noexcept { return schedule_; }

 private:
  void schedule_batch(const Batch& batch);
  int64_t longest_queue() const;
  void write_sharing_merges(const Batch& batch);
  void write_queues();
  WorkTile* write_pieces(const QueueFiller& filler, int32_t cta, bool whole_first,
                         std::vector<int32_t>& next_whole, WorkTile* next) const;
  void write_whole(const Item& item, std::vector<int32_t>& next_whole) const;

  ScheduleShape shape_;
  ScheduleMemory memory_;
  int32_t max_merges_ = 0;
  Schedule schedule_;
  PrefixTree prefixes_;
  SharingMerges sharing_;
  RowTiles row_tiles_;
  QueueFiller prefix_filler_;  // for shared prefixes, which come first in each queue
  QueueFiller filler_;
  // For each queue, where its next whole tile goes.
  std::vector<int32_t> next_whole_prefix_;
  std::vector<int32_t> next_whole_;
};

}  // namespace flashplan
