// SPDX-License-Identifier: Apache-2.0
// Cuts what does not fit whole, to fill the queues.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/row_tiles.h"

namespace flashplan {

/// Some kv heads of a row tile, which is given by its number, and the queue they go to.
struct Item {
  int32_t row_tile;
  int32_t head;
  int32_t num_heads;
  int32_t cta;
};

/// Lays items end to end, over (head, step), and cuts where a queue is full (McNaughton's
/// wrap-around rule). A queue then has at most two parts of splits: its first piece and its last.
class Cutter {
 public:
  /// For up to `max_pieces`. May throw std::bad_alloc.
  void reserve(const ScheduleShape& shape, int32_t max_pieces);

  /// Starts with the first queue. Each has a predicted cost in `loads` already and room up to
  /// `capacity`; the last one takes what is over. For each head that is cut a merge is written to
  /// `merges`.
  void start(int64_t capacity, int64_t* loads, const Segment* segments, Merge* merges);
  /// Lays `items`, and adds what they cost to the loads.
  void lay(const RowTiles& row_tiles, std::span<const Item> items);
  /// After the last item.
  void finish();

  std::span<const WorkTile> pieces_of(int32_t cta) const {
    const int32_t* ends = piece_ends_.data() + cta;
    return {pieces_.data() + ends[0], pieces_.data() + ends[1]};
  }
  int32_t num_merges() const { return num_merges_; }
  int32_t num_slots() const { return num_slots_; }

 private:
  ScheduleShape shape_;
  std::vector<WorkTile> pieces_;     // queue after queue
  std::vector<int32_t> piece_ends_;  // of the queue before each
  int64_t capacity_ = 0;
  int64_t* loads_ = nullptr;
  const Segment* segments_ = nullptr;
  Merge* merges_ = nullptr;
  int32_t cta_ = 0;
  int32_t num_pieces_ = 0;
  int32_t num_merges_ = 0;
  int32_t num_slots_ = 0;
};

}  // namespace flashplan
