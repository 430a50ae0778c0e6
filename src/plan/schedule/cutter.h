// SPDX-License-Identifier: Apache-2.0
// Cuts the items that do not fit into a queue as a whole, and fills the queues with the pieces. A
// piece is a work tile with some of the heads of an item, or with a part of their keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/schedule/row_tiles.h"
#include "plan/schedule/sharing_merges.h"

namespace flashplan {

/// Consecutive kv heads of a row tile, given by its number, and the queue that they go to.
struct Item {
  int32_t row_tile;
  int32_t head;
  int32_t num_heads;
  int32_t cta;
};

/// Lays items end to end, the steps of one head after those of another, and cuts where a queue is
/// full (McNaughton's wrap-around rule). A queue then has at most two pieces of split heads: its
/// first and its last piece.
class Cutter {
 public:
  /// Allocates for up to `max_pieces` pieces. May throw std::bad_alloc.
  void reserve(const ScheduleShape& shape, int32_t max_pieces);
  /// Leaves all queues but the first `num_queues` empty, from the next start() on.
  void take_queues(int32_t num_queues) noexcept { shape_.num_ctas = num_queues; }

  /// Begins a batch. The merges of requests and prefixes that share keys, `sharing`, are written
  /// already. The merges of other heads that are cut will be written in front of these, from the
  /// back to the front. Unless `cuts_always` is true, a head is cut only if the work that moves to
  /// the next queue is more than the cut costs.
  void begin(const Segment* segments, const SharingMerges& sharing, bool cuts_always);
  /// Starts with the first queue, and forgets all cuts. `loads` is the predicted cost of what each
  /// queue has already. Queues are filled up to `capacity`; the last one takes what is left over.
  /// `heads_at_once` kv heads of a decode are cut at the same keys.
  void start(int64_t capacity, int64_t* loads, int32_t heads_at_once);
  /// Puts `items` into the queues, one behind the other, and adds their cost to the loads.
  void lay(const RowTiles& row_tiles, std::span<const Item> items);
  /// Marks where the queues end. It must be called after the last item.
  void finish();

  std::span<const WorkTile> pieces_of(int32_t cta) const {
    const int32_t* ends = piece_ends_.data() + cta;
    return {pieces_.data() + ends[0], pieces_.data() + ends[1]};
  }
  /// The smallest number that a merge of the batch has. Merges are numbered from the end of their
  /// memory down.
  int32_t first_merge() const { return first_merge_; }
  int32_t num_partial_rows() const {
    return sharing_.num_partial_rows + num_slots_ * shape_.tile_q;
  }
  /// The number of heads that were cut.
  int32_t num_cut() const { return num_cut_; }

 private:
  struct Position;
  template <bool kChunked>
  class ItemCuts;
  /// The slots that were last taken for chunks. Several row tiles of few rows lie side by side in
  /// them: state i of each row tile is in slot i of the shelf.
  struct Shelf {
    int32_t num_slots = 0;
    int32_t num_rows = 0;  // rows of each slot that are taken
  };
  /// What a merge of a sharer (see PrefixTree) had before its head was cut; start() restores it.
  /// The number of states is not kept, because an uncut head has one.
  struct Uncut {
    int32_t merge;
    int32_t first_partial_row;
    int32_t num_pieces;
  };

  template <bool kChunked>
  void lay_items(const RowTiles& row_tiles, std::span<const Item> items);

  ScheduleShape shape_;
  std::vector<WorkTile> pieces_;     // the pieces of all queues, one queue after the other
  std::vector<int32_t> piece_ends_;  // piece_ends_[c + 1]: the end of the pieces of queue c
  int64_t capacity_ = 0;
  int64_t* loads_ = nullptr;
  const Segment* segments_ = nullptr;
  SharingMerges sharing_;
  bool cuts_always_ = false;
  int32_t heads_at_once_ = 1;
  std::vector<Uncut> uncut_;
  int32_t cta_ = 0;
  int32_t num_pieces_ = 0;
  int32_t first_merge_ = 0;
  int32_t num_slots_ = 0;
  Shelf shelf_;
  int32_t num_cut_ = 0;
  int32_t num_uncut_ = 0;
};

}  // namespace flashplan
