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

void Cutter::begin(const Segment* segments, const SharingMerges& sharing) {
  segments_ = segments;
  sharing_ = sharing;
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

void Cutter::lay(const RowTiles& row_tiles, std::span<const Item> items) {
  // Members are copied to locals: the compiler would read them again after every piece it writes.
  const CostModel cost = shape_.cost;
  const int32_t tile_q = shape_.tile_q;
  const int32_t tile_kv = shape_.tile_kv;
  const int32_t num_kv_heads = shape_.num_kv_heads;
  const int granule_shift = log2_of(shape_.granule());
  const bool chunked = shape_.chunk_kv > 0;
  const int32_t spare_chunks = shape_.mask.window_left >= 0 ? 1 : 0;
  const int32_t last_cta = shape_.num_ctas - 1;
  const SharingMerges sharing = sharing_;
  const auto max_slots = static_cast<int32_t>(
      (int64_t{shape_.max_partial_slots} * tile_q - sharing.num_partial_rows) / tile_q);
  const int64_t capacity = capacity_;
  int64_t* const loads = loads_;
  const Segment* const segments = segments_;
  Merge* const merges = sharing.merges;
  int32_t* const piece_ends = piece_ends_.data() + 1;
  WorkTile* const pieces = pieces_.data();
  int32_t num_pieces = num_pieces_;
  int32_t first_merge = first_merge_;
  int32_t num_slots = num_slots_;
  int32_t cta = cta_;
  int64_t room = capacity - loads[cta];

  for (const Item& item : items) {
    const RowTile& tile = row_tiles[item.row_tile];
    const int32_t segment = tile.segment;
    const int32_t row_tile = tile.row_tile;
    const KeySpan keys = tile.keys;
    const int32_t num_rows = tile.num_rows;
    const int32_t num_steps = ceil_divide(keys.end - keys.begin, tile_kv);
    // The results of a sharer are partial even if it is not cut.
    const bool shares = tile.sharer >= 0;
    const int32_t merge_of_head_0 = shares ? sharing.first + tile.sharer * num_kv_heads : -1;
    const int64_t of_tile = cost.of_tile(num_rows);
    const int64_t of_step = cost.of_step(num_rows);
    const int64_t of_split = cost.of_split(num_rows);
    const int32_t heads_end = item.head + item.num_heads;
    int32_t head = item.head;
    int32_t step = 0;    // steps of the head that are placed; > 0: the head is cut
    int32_t merge = -1;  // of the head, once it is cut

    const auto place = [&](int32_t num_heads, int32_t end_step, int64_t piece_cost) {
      int32_t row = -1;
      int32_t number = merge;
      if (merge >= 0) {
        Merge& of = merges[merge];
        const int32_t state = chunked ? step >> granule_shift : of.num_states;
        row = of.first_partial_row + state * tile_q;
        ++of.num_pieces;
        if (!chunked) {
          ++of.num_states;
          ++num_slots;
        }
      } else if (shares) {
        number = merge_of_head_0 + head;
        row = merges[number].first_partial_row;
      }
      const int32_t begin = keys.begin + step * tile_kv;
      const int32_t end = end_step == num_steps ? keys.end : keys.begin + end_step * tile_kv;
      pieces[num_pieces++] = {segment, row_tile, head, num_heads, begin, end, row, number};
      room -= piece_cost;
    };
    const auto finish_heads = [&](int32_t num_heads, int64_t cost_of_each) {
      place(num_heads, num_steps, cost_of_each * num_heads);
      head += num_heads;
      step = 0;
      merge = -1;
    };
    const auto next_cta = [&] {
      loads[cta] = capacity - room;
      piece_ends[cta] = num_pieces;
      ++cta;
      room = capacity - loads[cta];
    };
    // Steps are whole granules, and leave at least one step for the next piece.
    const auto steps_that_fit = [&] {
      const int64_t room_for_steps = room - of_tile - of_split;
      if (room_for_steps < of_step) return 0;
      const int64_t steps = std::min<int64_t>(room_for_steps / of_step, num_steps - step - 1);
      return static_cast<int32_t>(steps) >> granule_shift << granule_shift;
    };
    // Makes sure that the head has a merge, and slots for the next piece and for the rest. Returns
    // false if there are too few slots.
    const auto open_merge = [&] {
      // Each chunk needs a slot. With a window, and a real length shorter than planned, the keys
      // may begin earlier and touch one more chunk.
      const int32_t chunks = ceil_shift(num_steps, granule_shift) + spare_chunks;
      const int32_t needed = chunked ? (merge < 0 ? chunks : 0) : 2;
      if (num_slots + needed > max_slots) return false;
      if (merge >= 0) return true;
      const int32_t first_row = sharing.num_partial_rows + num_slots * tile_q;
      if (shares) {
        merge = merge_of_head_0 + head;
        uncut_[static_cast<std::size_t>(num_uncut_++)] = {merge, merges[merge]};
        // The pieces of this head replace the whole head, which counted as one piece.
        merges[merge].first_partial_row = first_row;
        merges[merge].num_states = 0;
        --merges[merge].num_pieces;
        return true;
      }
      const int32_t reserved = chunked ? chunks : 0;
      merge = --first_merge;
      merges[merge] = {.rows = {segment, segments[segment].qo_begin, row_tile * tile_q, num_rows},
                       .kv_head = head,
                       .first_partial_row = first_row,
                       .num_states = reserved,
                       .num_pieces = 0,
                       .parent = -1,
                       .first_reader = -1,
                       .num_readers = 0,
                       .reader_step = 0};
      num_slots += reserved;
      return true;
    };

    while (head < heads_end) {
      const int64_t rest_cost =
          of_tile + (num_steps - step) * of_step + (shares || merge >= 0 ? of_split : 0);
      if (cta == last_cta || rest_cost <= room) {
        const int32_t left = merge < 0 ? heads_end - head : 1;
        const bool all = cta == last_cta || left * rest_cost <= room;
        finish_heads(all ? left : static_cast<int32_t>(room / rest_cost), rest_cost);
        continue;
      }
      const int32_t steps = steps_that_fit();
      // A cut must place more work in this queue than it costs.
      if (steps <= 0 || steps * of_step < of_split) {
        next_cta();
      } else if (!open_merge()) {
        finish_heads(1, rest_cost);  // there is no slot for another piece: all stays in this queue
      } else {
        place(1, step + steps, of_tile + steps * of_step + of_split);
        step += steps;
        next_cta();
      }
    }
  }
  loads[cta] = capacity - room;
  cta_ = cta;
  num_pieces_ = num_pieces;
  first_merge_ = first_merge;
  num_slots_ = num_slots;
}

void Cutter::finish() { std::fill(piece_ends_.begin() + cta_ + 1, piece_ends_.end(), num_pieces_); }

}  // namespace flashplan
