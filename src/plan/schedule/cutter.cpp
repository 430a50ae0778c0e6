// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule/cutter.h"

#include <algorithm>

#include "plan/schedule/division.h"

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

void Cutter::start(int64_t capacity, int64_t* loads, int32_t heads_at_once) {
  capacity_ = capacity;
  heads_at_once_ = heads_at_once;
  loads_ = loads;
  for (const Uncut& uncut : std::span(uncut_.data(), static_cast<std::size_t>(num_uncut_))) {
    Merge& merge = sharing_.merges[uncut.merge];
    merge.first_partial_row = uncut.first_partial_row;
    merge.num_states = 1;
    merge.num_pieces = uncut.num_pieces;
  }
  cta_ = 0;
  num_pieces_ = 0;
  first_merge_ = sharing_.first;
  num_slots_ = 0;
  shelf_ = {};
  num_cut_ = 0;
  num_uncut_ = 0;
}

/// The state of lay(). It is a local object, which the compiler keeps in registers as long as all
/// functions that use it are inlined. Members of Cutter would be read from memory again after every
/// piece that is written, since the write might have changed them.
struct Cutter::Position {
  explicit Position(Cutter& cutter)
      : tile_q(cutter.shape_.tile_q),
        tile_kv(cutter.shape_.tile_kv),
        of_step(make_divisor(tile_kv)),
        num_kv_heads(cutter.shape_.num_kv_heads),
        heads_at_once(cutter.heads_at_once_),
        granule_shift(log2_of(cutter.shape_.granule())),
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
        next_piece(pieces + cutter.num_pieces_),
        first_merge(cutter.first_merge_),
        num_slots(cutter.num_slots_),
        shelf(cutter.shelf_),
        num_cut(cutter.num_cut_),
        next_uncut(cutter.uncut_.data() + cutter.num_uncut_),
        cta(cutter.cta_),
        room(capacity - loads[cta]) {}

  void save(Cutter& cutter) const {
    loads[cta] = capacity - room;
    cutter.cta_ = static_cast<int32_t>(cta);
    cutter.num_pieces_ = num_pieces();
    cutter.first_merge_ = first_merge;
    cutter.num_slots_ = num_slots;
    cutter.shelf_ = shelf;
    cutter.num_cut_ = num_cut;
    cutter.num_uncut_ = static_cast<int32_t>(next_uncut - cutter.uncut_.data());
  }

  int32_t num_pieces() const { return static_cast<int32_t>(next_piece - pieces); }

  /// Whether this is the last queue, which takes all that is left.
  bool is_last() const { return cta == last_cta; }

  /// Whether the slots of `shelf` have room for `count` states of `rows` rows.
  bool fits_shelf(int32_t count, int32_t rows) const {
    return count <= shelf.num_slots && shelf.num_rows + rows <= tile_q;
  }
  /// Takes room for the states of `count` chunks of `rows` rows: in the slots of `shelf` or, if
  /// they do not fit there, in new slots. Returns the first partial row of these states.
  int32_t take_chunks(int32_t count, int32_t rows) {
    if (!fits_shelf(count, rows)) {
      num_slots += count;
      shelf = {.num_slots = count, .num_rows = 0};
    }
    const int32_t row = (num_slots - shelf.num_slots) * tile_q + shelf.num_rows;
    shelf.num_rows += rows;
    return sharing.num_partial_rows + row;
  }

  void next_cta() {
    loads[cta] = capacity - room;
    piece_ends[cta] = num_pieces();
    ++cta;
    room = capacity - loads[cta];
  }

  const int32_t tile_q;
  const int32_t tile_kv;
  const Divisor of_step;  // divides by tile_kv
  const int32_t num_kv_heads;
  const int32_t heads_at_once;
  const int granule_shift;
  const bool cuts_always;
  const int32_t spare_chunks;  // chunks that a head may have beyond its planned ones
  const int32_t last_cta;
  const SharingMerges sharing;
  const int32_t max_slots;
  const int64_t capacity;
  int64_t* const loads;
  const Segment* const segments;
  int32_t* const piece_ends;
  WorkTile* const pieces;
  WorkTile* next_piece;
  int32_t first_merge;
  int32_t num_slots;
  Shelf shelf;  // the last slots that were taken for chunks; the next chunks may still fit there
  int32_t num_cut;
  Uncut* next_uncut;
  int64_t cta;
  int64_t room;  // cost that still fits into the queue of `cta`
};

/// Puts the heads of one item into queues, and cuts where a queue is full. `kChunked`: for
/// batch-invariant plans, which write a state for each chunk of keys and cut between chunks only.
template <bool kChunked>
class Cutter::ItemCuts {
 public:
  ItemCuts(Position& at, const RowTile& tile, const RowCosts& costs, const Item& item)
      : at_(at),
        tile_(tile),
        merge_of_head_0_(tile.sharer < 0 ? -1 : at.sharing.first + tile.sharer * at.num_kv_heads),
        of_step_(costs.step),
        of_partial_(tile.sharer < 0 ? costs.split : costs.write),
        of_piece_(costs.tile + of_partial_),
        at_once_(cuts_several_heads() ? at.heads_at_once : 1),
        heads_end_(item.head + item.num_heads),
        head_(item.head) {}

  [[gnu::always_inline]] void lay() {
    while (head_ < heads_end_) {
      const int32_t left = heads_end_ - head_;
      cut_heads_ = std::min(at_once_, left);
      if (at_.is_last() || left * tile_.head_cost <= at_.room) {
        place_whole(left);
      } else if (cut_heads_ * tile_.head_cost <= at_.room) {
        const auto fitting = static_cast<int32_t>(divide(at_.room, tile_.head_cost));
        place_whole(fitting - fitting % cut_heads_);
      } else if (const int32_t steps = steps_to_cut(num_steps()); steps == 0) {
        at_.next_cta();
      } else if (!has_room_for_states()) {
        place_whole(cut_heads_);  // no slot is left for pieces, so the heads stay in this queue
      } else {
        place_in_pieces(steps);
      }
    }
  }

 private:
  /// Whether several heads are cut at the same keys. Where a queue gets less than one head, each
  /// head is cut by itself, because cutting two together would double the states to be merged.
  bool cuts_several_heads() const {
    constexpr int32_t kMostKeys = 1 << 29;  // twice this number still fits into an int32
    return !kChunked && at_.heads_at_once > 1 && !shares() && tile_.num_rows <= kMostPairedRows &&
           tile_.num_rows * at_.heads_at_once <= at_.tile_q && tile_.keys.end <= kMostKeys &&
           tile_.head_cost <= at_.capacity;
  }
  /// Whether the tile belongs to a shared prefix or to a request that reads one. Such a tile has
  /// merges even if it is not cut.
  bool shares() const { return merge_of_head_0_ >= 0; }
  bool has_slots(int32_t count) const { return at_.num_slots + count <= at_.max_slots; }
  /// Whether there is room for the states of the next heads, if they are cut.
  bool has_room_for_states() const {
    if constexpr (!kChunked) return has_slots(2);
    return at_.fits_shelf(num_chunks(), tile_.num_rows) || has_slots(num_chunks());
  }
  /// The number of steps that the next heads take. If cut_heads_ heads are cut together, a step has
  /// tile_kv / cut_heads_ keys of each, so that it costs as much as a step of one head.
  int32_t num_steps() const {
    const int32_t num_keys = tile_.keys.end - tile_.keys.begin;
    return ceil_divide(num_keys * cut_heads_, at_.of_step);
  }

  /// The number of chunks of a head, each of which needs a slot. With a sliding window and a real
  /// length shorter than planned, the keys may begin earlier and touch one more chunk.
  int32_t num_chunks() const {
    return ceil_shift(num_steps(), at_.granule_shift) + at_.spare_chunks;
  }

  /// How many of the last `steps_left` steps of a head this queue gets as a piece. At least one
  /// step is left for the next queue, and batch-invariant plans cut between chunks only. 0: a cut
  /// in this queue is not worth its cost.
  int32_t steps_to_cut(int32_t steps_left) const {
    const int64_t room_for_steps = at_.room - of_piece_ * cut_heads_;
    if (room_for_steps < of_step_) return 0;
    const int64_t most = std::min<int64_t>(divide(room_for_steps, of_step_), steps_left - 1);
    auto steps = static_cast<int32_t>(most);
    if (kChunked) steps = steps >> at_.granule_shift << at_.granule_shift;
    return at_.cuts_always || steps * of_step_ >= of_partial_ ? steps : 0;
  }

  /// Writes a work tile of the next heads.
  void place(int32_t num_heads, int32_t kv_begin, int32_t kv_end, int32_t row, int32_t merge) {
    *at_.next_piece++ = {tile_.segment, tile_.row_tile, head_, num_heads,
                         kv_begin,      kv_end,         row,   merge};
  }

  /// Puts the next heads into this queue as a whole.
  void place_whole(int32_t num_heads) {
    const int32_t merge = shares() ? merge_of_head_0_ + head_ : -1;
    const int32_t row = shares() ? at_.sharing.merges[merge].first_partial_row : -1;
    place(num_heads, tile_.keys.begin, tile_.keys.end, row, merge);
    at_.room -= tile_.head_cost * num_heads;
    head_ += num_heads;
  }

  /// Cuts the next cut_heads_ heads into pieces, and puts them into this queue and the next ones.
  /// The first piece has `steps` steps.
  void place_in_pieces(int32_t steps) {
    const int32_t merge = shares() ? merge_of_head_0_ + head_ : --at_.first_merge;
    const int32_t first_row = kChunked ? at_.take_chunks(num_chunks(), tile_.num_rows)
                                       : at_.sharing.num_partial_rows + at_.num_slots * at_.tile_q;
    // The cost of what is left of the heads. Their last piece writes a partial result, whose cost
    // is added here. If shares(), head_cost contains it, because uncut heads write one too.
    int64_t rest = (tile_.head_cost + (shares() ? 0 : of_partial_)) * cut_heads_;
    int32_t row = first_row;
    int32_t num_pieces = 1;
    int32_t steps_left = num_steps();
    int32_t kv_begin = tile_.keys.begin;
    while (true) {
      if (steps > 0) {
        const int32_t kv_end = kv_begin + steps * at_.tile_kv / cut_heads_;
        place(cut_heads_, kv_begin, kv_end, row, merge);
        at_.room -= of_piece_ * cut_heads_ + steps * of_step_;
        rest -= steps * of_step_;
        row += kChunked ? (steps >> at_.granule_shift) * at_.tile_q : at_.tile_q;
        steps_left -= steps;
        kv_begin = kv_end;
        ++num_pieces;
      }
      at_.next_cta();
      if (at_.is_last() || rest <= at_.room) break;
      steps = steps_to_cut(steps_left);
      const bool is_out_of_slots = !kChunked && !has_slots(num_pieces + 1);
      if (steps > 0 && is_out_of_slots) break;
    }
    place(cut_heads_, kv_begin, tile_.keys.end, row, merge);
    at_.room -= rest;
    const int32_t num_states = kChunked ? num_chunks() : num_pieces;
    if (!kChunked) at_.num_slots += num_states;
    write_merge(merge, first_row, num_states, num_pieces);
    at_.num_cut += cut_heads_;
    head_ += cut_heads_;
  }

  void write_merge(int32_t number, int32_t first_row, int32_t num_states, int32_t num_pieces) {
    Merge& merge = at_.sharing.merges[number];
    if (shares()) {
      // merge.num_pieces, for which the merge waits, has counted the uncut head as one piece.
      *at_.next_uncut++ = {number, merge.first_partial_row, merge.num_pieces};
      merge.first_partial_row = first_row;
      merge.num_states = num_states;
      merge.num_pieces += num_pieces - 1;
      return;
    }
    merge = {.rows = {tile_.segment, at_.segments[tile_.segment].qo_begin,
                      tile_.row_tile * at_.tile_q, tile_.num_rows},
             .kv_head = head_,
             .first_partial_row = first_row,
             .num_states = num_states,
             .num_pieces = num_pieces,
             .parent = -1,
             .first_reader = -1,
             .num_readers = 0,
             .reader_step = 0};
  }

  Position& at_;
  const RowTile tile_;
  const int32_t merge_of_head_0_;  // the merge of kv head 0 if shares(), else -1
  const int64_t of_step_;
  // The next two are costs for one head:
  const int64_t of_partial_;  // cost of writing a partial result and, unless shares(), merging it
  const int64_t of_piece_;    // cost of a piece besides its steps
  const int32_t at_once_;     // how many heads are cut at the same keys
  const int32_t heads_end_;
  int32_t head_;
  int32_t cut_heads_ = 1;  // heads to be cut together: at_once_, or fewer if fewer are left
};

void Cutter::lay(const RowTiles& row_tiles, std::span<const Item> items) {
  if (shape_.chunk_kv > 0) {
    lay_items<true>(row_tiles, items);
  } else {
    lay_items<false>(row_tiles, items);
  }
}

template <bool kChunked>
void Cutter::lay_items(const RowTiles& row_tiles, std::span<const Item> items) {
  Position at(*this);
  for (const Item& item : items) {
    const RowTile& tile = row_tiles[item.row_tile];
    ItemCuts<kChunked>(at, tile, row_tiles.costs(tile.num_rows), item).lay();
  }
  at.save(*this);
}

void Cutter::finish() { std::fill(piece_ends_.begin() + cta_ + 1, piece_ends_.end(), num_pieces_); }

}  // namespace flashplan
