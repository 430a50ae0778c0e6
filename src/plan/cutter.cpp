// SPDX-License-Identifier: Apache-2.0
#include "plan/cutter.h"

#include <algorithm>

#include "plan/division.h"

namespace flashplan {

void Cutter::reserve(const ScheduleShape& shape, int32_t max_pieces) {
  shape_ = shape;
  pieces_.resize(static_cast<std::size_t>(max_pieces));
  piece_ends_.assign(static_cast<std::size_t>(shape.num_ctas) + 1, 0);
  uncut_.resize(static_cast<std::size_t>(shape.num_ctas));
}

void Cutter::begin(const Segment* segments, const SharingMerges& sharing, bool cuts_always) {
  segments_ = segments;
  sharing_ = sharing;
  cuts_always_ = cuts_always;
  num_uncut_ = 0;
}

void Cutter::start(int64_t capacity, int64_t* loads) {
  capacity_ = capacity;
  loads_ = loads;
  for (const Uncut& uncut : std::span(uncut_.data(), static_cast<std::size_t>(num_uncut_))) {
    sharing_.merges[uncut.number] = uncut.merge;
  }
  cta_ = 0;
  num_pieces_ = 0;
  first_merge_ = sharing_.first;
  num_slots_ = 0;
  num_uncut_ = 0;
}

/// What lay() reads and writes. It is a local object, which stays in registers as long as all that
/// uses it is inlined: members of Cutter would be read again after every piece that is written.
struct Cutter::Position {
  explicit Position(Cutter& cutter)
      : cost(cutter.shape_.cost),
        tile_q(cutter.shape_.tile_q),
        tile_kv(cutter.shape_.tile_kv),
        num_kv_heads(cutter.shape_.num_kv_heads),
        granule_shift(log2_of(cutter.shape_.granule())),
        chunked(cutter.shape_.chunk_kv > 0),
        cuts_always(cutter.cuts_always_),
        spare_chunks(cutter.shape_.mask.window_left >= 0 ? 1 : 0),
        last_cta(cutter.shape_.num_ctas - 1),
        sharing(cutter.sharing_),
        max_slots(static_cast<int32_t>(
            (int64_t{cutter.shape_.max_partial_slots} * tile_q - sharing.num_partial_rows) /
            tile_q)),
        capacity(cutter.capacity_),
        loads(cutter.loads_),
        segments(cutter.segments_),
        piece_ends(cutter.piece_ends_.data() + 1),
        pieces(cutter.pieces_.data()),
        uncut(cutter.uncut_.data()),
        num_pieces(cutter.num_pieces_),
        first_merge(cutter.first_merge_),
        num_slots(cutter.num_slots_),
        num_uncut(cutter.num_uncut_),
        cta(cutter.cta_),
        room(capacity - loads[cta]) {}

  void save(Cutter& cutter) const {
    loads[cta] = capacity - room;
    cutter.cta_ = cta;
    cutter.num_pieces_ = num_pieces;
    cutter.first_merge_ = first_merge;
    cutter.num_slots_ = num_slots;
    cutter.num_uncut_ = num_uncut;
  }

  /// The cost of merging the states of a tile's rows with those of the prefixes that they read; 0
  /// if they read none.
  int64_t of_merge(const RowTile& tile) const {
    return tile.sharer >= 0 && !is_prefix(segments[tile.segment]) ? cost.of_merge() : 0;
  }

  void next_cta() {
    loads[cta] = capacity - room;
    piece_ends[cta] = num_pieces;
    ++cta;
    room = capacity - loads[cta];
  }

  const CostModel cost;
  const int32_t tile_q;
  const int32_t tile_kv;
  const int32_t num_kv_heads;
  const int granule_shift;
  const bool chunked;
  const bool cuts_always;
  const int32_t spare_chunks;  // of a head; see num_chunks() below
  const int32_t last_cta;
  const SharingMerges sharing;
  const int32_t max_slots;
  const int64_t capacity;
  int64_t* const loads;
  const Segment* const segments;
  int32_t* const piece_ends;
  WorkTile* const pieces;
  Uncut* const uncut;
  int32_t num_pieces;
  int32_t first_merge;
  int32_t num_slots;
  int32_t num_uncut;
  int32_t cta;
  int64_t room;  // in the queue of `cta`
};

/// Lays the heads of one item.
class Cutter::ItemCuts {
 public:
  ItemCuts(Position& at, const RowTile& tile, const Item& item)
      : at_(at),
        tile_(tile),
        num_steps_(ceil_divide(tile.keys.end - tile.keys.begin, at.tile_kv)),
        merge_of_head_0_(tile.sharer < 0 ? -1 : at.sharing.first + tile.sharer * at.num_kv_heads),
        of_tile_(at.cost.of_tile(tile.num_rows)),
        of_step_(at.cost.of_step(tile.num_rows)),
        of_partial_(tile.sharer < 0 ? at.cost.of_split(tile.num_rows)
                                    : at.cost.of_write(tile.num_rows)),
        of_merge_(at.of_merge(tile)),
        heads_end_(item.head + item.num_heads),
        head_(item.head) {}

  [[gnu::always_inline]] void lay() {
    while (head_ < heads_end_) {
      const int64_t rest_cost = of_tile_ + (num_steps_ - step_) * of_step_ +
                                (shares() || merge_ >= 0 ? of_partial_ : 0) + of_merge_;
      if (at_.cta == at_.last_cta || rest_cost <= at_.room) {
        const int32_t left = merge_ < 0 ? heads_end_ - head_ : 1;
        const bool all = at_.cta == at_.last_cta || left * rest_cost <= at_.room;
        finish_heads(all ? left : static_cast<int32_t>(at_.room / rest_cost), rest_cost);
        continue;
      }
      const int32_t steps = steps_that_fit();
      const bool is_worth_it = at_.cuts_always || steps * of_step_ >= of_partial_;
      if (steps <= 0 || !is_worth_it) {
        at_.next_cta();
      } else if (!open_merge()) {
        finish_heads(1, rest_cost);  // there is no slot for another piece: all stays in this queue
      } else {
        place(1, step_ + steps, of_tile_ + steps * of_step_ + of_partial_);
        step_ += steps;
        at_.next_cta();
      }
    }
  }

 private:
  /// The results of a sharer are partial even if it is not cut.
  bool shares() const { return merge_of_head_0_ >= 0; }

  /// Steps for a piece in this queue: whole granules, which leave at least one step for the next
  /// piece.
  int32_t steps_that_fit() const {
    const int64_t room_for_steps = at_.room - of_tile_ - of_partial_;
    if (room_for_steps < of_step_) return 0;
    const int64_t steps = std::min<int64_t>(room_for_steps / of_step_, num_steps_ - step_ - 1);
    return static_cast<int32_t>(steps) >> at_.granule_shift << at_.granule_shift;
  }

  /// Chunks of a head, each of which needs a slot. With a window, and a real length shorter than
  /// planned, the keys may begin earlier and touch one more chunk.
  int32_t num_chunks() const {
    return ceil_shift(num_steps_, at_.granule_shift) + at_.spare_chunks;
  }

  /// Makes sure that the head has a merge, and slots for the next piece and for the rest. Returns
  /// false if there are too few slots.
  bool open_merge() {
    const int32_t needed = at_.chunked ? (merge_ < 0 ? num_chunks() : 0) : 2;
    if (at_.num_slots + needed > at_.max_slots) return false;
    if (merge_ >= 0) return true;
    const int32_t first_row = at_.sharing.num_partial_rows + at_.num_slots * at_.tile_q;
    if (shares()) {
      take_merge_of_sharer(first_row);
    } else {
      make_merge(first_row);
    }
    return true;
  }

  /// Lets the pieces of this head replace the whole head, which counted as one piece of its merge.
  void take_merge_of_sharer(int32_t first_row) {
    merge_ = merge_of_head_0_ + head_;
    Merge& merge = at_.sharing.merges[merge_];
    at_.uncut[at_.num_uncut++] = {merge_, merge};
    merge.first_partial_row = first_row;
    merge.num_states = 0;
    --merge.num_pieces;
  }

  void make_merge(int32_t first_row) {
    const int32_t reserved = at_.chunked ? num_chunks() : 0;
    merge_ = --at_.first_merge;
    at_.sharing.merges[merge_] = {.rows = {tile_.segment, at_.segments[tile_.segment].qo_begin,
                                           tile_.row_tile * at_.tile_q, tile_.num_rows},
                                  .kv_head = head_,
                                  .first_partial_row = first_row,
                                  .num_states = reserved,
                                  .num_pieces = 0,
                                  .parent = -1,
                                  .first_reader = -1,
                                  .num_readers = 0,
                                  .reader_step = 0};
    at_.num_slots += reserved;
  }

  /// Writes a piece: the steps of `num_heads` heads from step_ up to `end_step`.
  void place(int32_t num_heads, int32_t end_step, int64_t piece_cost) {
    int32_t row = -1;
    int32_t merge = merge_;
    if (merge >= 0) {
      Merge& of = at_.sharing.merges[merge];
      const int32_t state = at_.chunked ? step_ >> at_.granule_shift : of.num_states;
      row = of.first_partial_row + state * at_.tile_q;
      ++of.num_pieces;
      if (!at_.chunked) {
        ++of.num_states;
        ++at_.num_slots;
      }
    } else if (shares()) {
      merge = merge_of_head_0_ + head_;
      row = at_.sharing.merges[merge].first_partial_row;
    }
    const KeySpan keys = tile_.keys;
    const int32_t begin = keys.begin + step_ * at_.tile_kv;
    const int32_t end = end_step == num_steps_ ? keys.end : keys.begin + end_step * at_.tile_kv;
    at_.pieces[at_.num_pieces++] = {tile_.segment, tile_.row_tile, head_, num_heads, begin, end,
                                    row,           merge};
    at_.room -= piece_cost;
  }

  void finish_heads(int32_t num_heads, int64_t cost_of_each) {
    place(num_heads, num_steps_, cost_of_each * num_heads);
    head_ += num_heads;
    step_ = 0;
    merge_ = -1;
  }

  Position& at_;
  const RowTile tile_;
  const int32_t num_steps_;
  const int32_t merge_of_head_0_;  // of a sharer; -1: the tile is none
  const int64_t of_tile_;
  const int64_t of_step_;
  const int64_t of_partial_;  // a partial result
  const int64_t of_merge_;    // of the last piece
  const int32_t heads_end_;
  int32_t head_;
  int32_t step_ = 0;    // steps of the head that are placed; > 0: the head is cut
  int32_t merge_ = -1;  // of the head, once it is cut
};

void Cutter::lay(const RowTiles& row_tiles, std::span<const Item> items) {
  Position at(*this);
  for (const Item& item : items) ItemCuts(at, row_tiles[item.row_tile], item).lay();
  at.save(*this);
}

void Cutter::finish() { std::fill(piece_ends_.begin() + cta_ + 1, piece_ends_.end(), num_pieces_); }

}  // namespace flashplan
