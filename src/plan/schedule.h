// SPDX-License-Identifier: Apache-2.0
// The scheduler: turns the lengths of one step into balanced work queues. Integer code, no CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "flashplan/plan.h"
#include "flashplan/schedule.h"
#include "plan/work_queue.h"

namespace flashplan {

/// Predicted time of a tile of `rows` query rows over `steps` key tiles, in arbitrary units:
///   tile + tile_row * rows + steps * (step + step_row * rows)
/// the paper's alpha * l_q + beta * l_kv with the terms a kernel family measured.
struct CostModel {
  int32_t tile = 0;
  int32_t tile_row = 0;
  int32_t step = 1;
  int32_t step_row = 0;
  // split + split_row * rows: of writing one partial result and merging it. A smaller gain is no
  // reason to split.
  int32_t split = 0;
  int32_t split_row = 0;
};

/// What the schedule needs to know of the problem and of the kernel; fixed for the life of a Plan.
struct ScheduleShape {
  int32_t num_kv_heads = 1;
  int32_t group_size = 1;  // query heads per kv head, packed: row = qo_idx * group_size + head
  bool causal = true;
  int32_t window_left = -1;
  int32_t tile_q = 64;   // packed query rows of a tile; a power of two
  int32_t tile_kv = 64;  // keys of a step; a power of two
  int32_t num_ctas = 1;
  int32_t max_partial_slots = 0;
  int32_t chunk_kv = 0;  // > 0: batch-invariant, states are formed per chunk of so many keys
  /// > 0: the row tiles of a request are dealt next to each other, head after head, in items of
  /// about so many steps: CTAs that run at the same time then read the same keys from a cache that
  /// they share. 0: all heads of a row tile stay together.
  int32_t item_steps = 0;
  CostModel cost;

  /// Steps between possible cuts.
  int32_t granule() const noexcept { return chunk_kv > 0 ? chunk_kv / tile_kv : 1; }
};

/// Work queues: CTA c runs tiles [cta_indptr[c], cta_indptr[c + 1]) in order.
struct Schedule {
  std::vector<RequestInfo> requests;
  std::vector<int32_t> cta_indptr;
  std::vector<WorkTile> tiles;
  std::vector<SplitTile> splits;
  std::vector<int64_t> cta_cost;  // predicted, per CTA
  int64_t total_cost = 0;         // predicted, of all row tiles uncut
  int32_t num_slots = 0;          // partial slots in use

  int32_t num_ctas() const noexcept { return static_cast<int32_t>(cta_cost.size()); }
};

/// Keys that the rows of one tile see, rounded down to whole steps at the left; {0, 0}: none.
struct KeyRange {
  int32_t begin;
  int32_t end;
};

/// Upper bounds of a schedule for any batch within (max_batch_size, max_qo_tokens).
struct ScheduleBounds {
  int32_t row_tiles;  // (request, row tile) pairs
  int32_t items;      // of heads of row tiles, before cuts
  int32_t work_tiles;
  int32_t splits;
};
ScheduleBounds schedule_bounds(const ScheduleShape& shape, int32_t max_batch_size,
                               int32_t max_qo_tokens);

/// Makes schedules without allocating.
class Scheduler {
 public:
  // Eight classes of cost per power of two, larger costs first: fine enough for longest-first.
  static constexpr uint32_t kClassesPerOctave = 8;
  static constexpr uint32_t kCostClasses = 48 * kClassesPerOctave;
  static constexpr uint16_t kGrouped = kCostClasses;

  /// Reserves memory for the bounds. May throw std::bad_alloc.
  void reserve(const ScheduleShape& shape, int32_t max_batch_size, int32_t max_qo_tokens);

  /// `batch` has been validated against the bounds.
  void make(const Batch& batch);

  const Schedule& schedule() const noexcept { return schedule_; }
  const ScheduleShape& shape() const noexcept { return shape_; }

 private:
  /// A row tile of all kv heads, before it is dealt. 32 bytes: planning is as fast as its tables
  /// are small.
  struct RowTile {
    int64_t head_cost;
    int32_t request;
    int32_t row_tile;
    KeyRange keys;
    uint16_t num_rows;
    uint16_t cost_class;  // 0: the longest; kGrouped: dealt with its group
  };
  /// A work tile and the queue it goes to.
  struct Placed {
    WorkTile tile;
    int32_t cta;
  };
  /// Heads of a row tile, which is given by its number, and the queue they go to.
  struct Item {
    int32_t row_tile;
    int32_t head;
    int32_t num_heads;
    int32_t cta;
  };
  /// The row tiles of one request, if there are several and they share a cache.
  struct Group {
    int32_t first;
    int32_t count;
  };

  class Dealer;

  class Cutter;

  void collect_row_tiles(const Batch& batch);
  void collect_request(int32_t request, int32_t qo_len, int32_t kv_len);
  void order_longest_first();
  void deal_items(int64_t share, int64_t capacity);
  void sort_left_items();
  void place_whole(int32_t first, int64_t capacity);
  void fill_queues(int64_t share);
  int64_t place_the_rest(int64_t capacity);
  int64_t cost_of(const Item& item) const;
  int64_t least_extra(int64_t share) const;
  int32_t heads_per_item(const Group& group, int64_t share) const;
  void write_queues();

  ScheduleShape shape_;
  // Derived from it.
  int q_shift_ = 0;
  int kv_shift_ = 0;
  int32_t queries_per_tile_ = 0;  // tile_q / group_size
  int32_t heads_per_tile_ = 0;    // tile_q % group_size
  int64_t full_tile_cost_ = 0;
  int64_t full_step_cost_ = 0;
  int32_t least_heads_ = 1;  // per item

  Schedule schedule_;
  // Sized by the bounds, used up to their counts: push_back's check costs as much as the work.
  std::vector<RowTile> row_tiles_;
  std::vector<Group> groups_;
  std::vector<int32_t> order_;       // row tiles that are in no group, longest first
  std::vector<Item> dealt_;          // and after them what is placed whole
  std::vector<Item> left_;           // that did not fit, and are cut
  std::vector<Item> sorted_;         // that were not dealt, longest first
  std::vector<int32_t> heap_;        // CTAs, the least loaded on top
  std::vector<Placed> pieces_;       // in the order of their CTA
  std::vector<int64_t> dealt_cost_;  // per CTA, of the whole tiles
  std::array<int32_t, kCostClasses + 1> class_sizes_ = {};  // the last: in groups
  RowTile* next_row_tile_ = nullptr;
  int32_t num_row_tiles_ = 0;
  int32_t num_groups_ = 0;
  int32_t num_ordered_ = 0;
  int32_t num_dealt_ = 0;
  int32_t num_whole_ = 0;  // dealt and placed
  int32_t num_left_ = 0;
  int32_t num_sorted_ = 0;
  int32_t num_pieces_ = 0;
};

}  // namespace flashplan
