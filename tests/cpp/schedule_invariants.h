// SPDX-License-Identifier: Apache-2.0
// Checks the invariants of every schedule against the slow planner's view of the batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/schedule/schedule.h"
#include "slow_planner.h"

namespace flashplan::test {

/// One kv head of one work tile.
struct Piece {
  WorkTile tile;
  int32_t cta;
  int32_t heads_before;  // in the work tile
  KeySpan keys;          // of the row tile
  auto key() const {
    return std::tuple(tile.segment, tile.row_tile, tile.kv_head, tile.kv_begin, tile.kv_end);
  }
};

class ScheduleChecker {
 public:
  ScheduleChecker(const Schedule& schedule, const Batch& batch, const ScheduleShape& shape,
                  const ScheduleBounds& bounds)
      : s_(schedule), batch_(batch), shape_(shape), bounds_(bounds) {}

  /// Empty if every invariant holds, else the first violation.
  std::string violation() {
    check_sizes();
    check_requests();
    if (ok()) check_queues();
    if (ok()) collect_pieces();
    if (ok()) check_coverage();
    if (ok()) check_costs();
    if (ok()) check_slots();
    return error_;
  }

 private:
  bool ok() const { return error_.empty(); }

  template <class... Parts>
  void require(bool condition, const Parts&... parts) {
    if (condition || !ok()) return;
    std::ostringstream out;
    ((out << parts << ' '), ...);
    error_ = out.str();
  }

  template <class... Parts>
  void require_of(const WorkTile& t, bool condition, const Parts&... parts) {
    require(condition, parts..., "in tile {segment", t.segment, "row_tile", t.row_tile, "kv_head",
            t.kv_head, "heads", t.num_kv_heads, "keys", t.kv_begin, t.kv_end, "slot", t.partial_row,
            "merge", t.merge, "}");
  }

  void check_sizes() {
    row_tiles_ = slow_row_tiles(shape_, batch_);
    require(static_cast<int64_t>(row_tiles_.size()) <= bounds_.row_tiles, "row tiles over bounds",
            row_tiles_.size(), bounds_.row_tiles);
    require(static_cast<int64_t>(s_.tiles.size()) <= bounds_.work_tiles, "work tiles over bounds",
            s_.tiles.size(), bounds_.work_tiles);
    // A cut divides an item into the heads before the cut, the head that is cut, and those after
    // it.
    const auto is_whole = [](const WorkTile& tile) { return tile.merge < 0; };
    const int64_t num_whole = std::count_if(s_.tiles.begin(), s_.tiles.end(), is_whole);
    const auto num_splits = static_cast<int64_t>(s_.merges.size());
    require(num_whole + num_splits <= int64_t{bounds_.items} + 2 * shape_.num_ctas,
            "items over bounds", num_whole, num_splits, bounds_.items);
    require(static_cast<int64_t>(s_.merges.size()) <= bounds_.merges, "merges over bounds",
            s_.merges.size(), bounds_.merges);
    const int32_t num_slots = s_.num_partial_rows / shape_.tile_q;
    require(num_slots >= 0 && num_slots <= shape_.max_partial_slots, "slots over the limit",
            num_slots, shape_.max_partial_slots);
    require(shape_.chunk_kv > 0 || num_slots <= 2 * shape_.num_ctas, "slots over the paper's bound",
            num_slots, shape_.num_ctas);
    require(shape_.cuts || s_.merges.empty(), "merges where nothing may be cut");
    require(s_.num_ctas() == shape_.num_ctas, "cta_cost has", s_.num_ctas(), "entries");
  }

  void check_requests() {
    require(static_cast<int32_t>(s_.segments.size()) == batch_.batch_size, "requests has",
            s_.segments.size(), "entries");
    int64_t cumulated = 0;
    for (int32_t r = 0; ok() && r < batch_.batch_size; ++r) {
      const Segment& segment = s_.segments[static_cast<size_t>(r)];
      const int64_t kv_begin = batch_.kv_indptr != nullptr ? batch_.kv_indptr[r] : cumulated;
      const int32_t qo_len = batch_.qo_indptr[r + 1] - batch_.qo_indptr[r];
      require(segment.qo_begin == batch_.qo_indptr[r], "qo_begin of request", r);
      require(segment.qo_len == qo_len, "qo_len of request", r);
      require(segment.position == batch_.kv_lens[r] - qo_len, "position of request", r);
      // Plan bounds the rows of ragged tensors; here they may wrap.
      const int32_t kv_row = shape_.paged ? r : static_cast<int32_t>(kv_begin);
      require(segment.kv_row == kv_row, "kv_row of request", r);
      cumulated += batch_.kv_lens[r];
    }
  }

  void check_queues() {
    const std::vector<int32_t>& indptr = s_.cta_indptr;
    require(indptr.size() == static_cast<size_t>(shape_.num_ctas) + 1, "cta_indptr has",
            indptr.size(), "entries");
    require(!indptr.empty() && indptr.front() == 0, "cta_indptr starts");
    require(std::is_sorted(indptr.begin(), indptr.end()), "cta_indptr descends");
    require(!indptr.empty() && indptr.back() == static_cast<int32_t>(s_.tiles.size()),
            "cta_indptr ends");
  }

  void collect_pieces() {
    for (int32_t cta = 0; cta < shape_.num_ctas; ++cta) {
      const auto c = static_cast<size_t>(cta);
      int32_t num_splits = 0;
      for (int32_t i = s_.cta_indptr[c]; i < s_.cta_indptr[c + 1]; ++i) {
        WorkTile tile = s_.tiles[static_cast<size_t>(i)];
        require_of(tile,
                   tile.num_kv_heads >= 1 && tile.kv_head >= 0 &&
                       tile.kv_head + tile.num_kv_heads <= shape_.num_kv_heads,
                   "heads");
        require_of(tile, (tile.partial_row == -1) == (tile.merge == -1), "row against merge");
        require_of(tile, tile.merge == -1 || tile.num_kv_heads <= shape_.heads_at_once,
                   "merge of several heads");
        const int32_t number = tile.merge - s_.first_merge;
        require_of(
            tile,
            tile.merge == -1 || (number >= 0 && number < static_cast<int32_t>(s_.merges.size())),
            "merge number");
        num_splits += tile.merge >= 0 ? 1 : 0;
        if (!ok()) return;
        for (int32_t head = 0; head < s_.tiles[static_cast<size_t>(i)].num_kv_heads; ++head) {
          pieces_.push_back({tile, cta, head, {}});
          ++tile.kv_head;
        }
      }
      require(num_splits <= kMostSplitsPerQueue, num_splits, "splits in queue", cta);
    }
    std::sort(pieces_.begin(), pieces_.end(),
              [](const Piece& a, const Piece& b) { return a.key() < b.key(); });
  }

  // Walks the problem and the sorted pieces side by side: a missing, doubled or misplaced piece
  // is where they first differ.
  void check_coverage() {
    auto piece = pieces_.begin();
    for (const SlowRowTile& want : row_tiles_) {
      for (int32_t head = 0; ok() && head < shape_.num_kv_heads; ++head) {
        const auto first = piece;
        while (piece != pieces_.end() && piece->tile.segment == want.request &&
               piece->tile.row_tile == want.row_tile && piece->tile.kv_head == head) {
          ++piece;
        }
        require(piece != first, "nothing computes request", want.request, "row tile", want.row_tile,
                "kv head", head);
        if (ok()) check_row_tile(want, &*first, static_cast<int32_t>(piece - first));
      }
      if (!ok()) return;
    }
    if (piece != pieces_.end()) require_of(piece->tile, false, "not a tile of the batch");
  }

  void check_row_tile(const SlowRowTile& want, Piece* pieces, int32_t num_pieces) {
    const WorkTile& first = pieces[0].tile;
    if (want.kv_begin == want.kv_end) {
      require_of(first, num_pieces == 1 && first.kv_begin == first.kv_end && first.merge == -1,
                 "a tile without keys");
      return;
    }
    int64_t position = want.kv_begin;
    for (int32_t p = 0; p < num_pieces; ++p) {
      const WorkTile& tile = pieces[p].tile;
      pieces[p].keys = {static_cast<int32_t>(want.kv_begin), static_cast<int32_t>(want.kv_end)};
      require_of(tile, tile.kv_begin == position, "gap or overlap at key", position);
      require_of(tile, tile.kv_end > tile.kv_begin, "piece without keys");
      require_of(tile, (tile.kv_begin - want.kv_begin) % step_of(tile) == 0, "inside a step");
      require_of(tile, tile.merge == first.merge, "two splits of one row tile");
      require_of(tile, pieces[p].heads_before == pieces[0].heads_before, "heads cut elsewhere");
      position = tile.kv_end;
    }
    require_of(first, position == want.kv_end, "keys end at", position, "not at", want.kv_end);
    require_of(first, (first.merge == -1) == (num_pieces == 1), "pieces", num_pieces);
    if (ok() && first.merge >= 0) check_merge(want, pieces, num_pieces);
  }

  /// Keys between possible cuts: heads that are cut together have shorter steps.
  int32_t step_of(const WorkTile& tile) const {
    return tile.merge >= 0 ? shape_.tile_kv / tile.num_kv_heads : shape_.tile_kv;
  }

  void check_merge(const SlowRowTile& want, const Piece* pieces, int32_t num_pieces) {
    const WorkTile& first = pieces[0].tile;
    const Merge& merge = s_.merges[static_cast<size_t>(first.merge - s_.first_merge)];
    const PackedRows& rows = merge.rows;
    require_of(first, rows.segment == first.segment, "merge");
    require_of(first, merge.kv_head + pieces[0].heads_before == first.kv_head, "head of the merge");
    require_of(first, rows.num_rows * first.num_kv_heads <= shape_.tile_q, "rows of a state");
    require_of(first, rows.qo_begin == batch_.qo_indptr[want.request], "first token of the merge");
    require_of(first, rows.row_begin == int64_t{want.row_tile} * shape_.tile_q, "its first row");
    require_of(first, rows.num_rows == want.num_rows, "its number of rows");
    require_of(first, merge.num_pieces == num_pieces, "num_pieces", merge.num_pieces);
    // With a window the keys may touch one more chunk; see fit_to_length().
    const int64_t chunks = ceil_div(want.kv_end - want.kv_begin, std::max(shape_.chunk_kv, 1)) +
                           (shape_.mask.window_left >= 0 ? 1 : 0);
    require_of(first, merge.num_states == (shape_.chunk_kv > 0 ? chunks : num_pieces), "num_states",
               merge.num_states);
    for (int32_t p = 0; p < num_pieces; ++p) {
      const WorkTile& tile = pieces[p].tile;
      int64_t index = p;
      if (shape_.chunk_kv > 0) {
        index = (tile.kv_begin - want.kv_begin) / shape_.chunk_kv;
        require_of(tile, (tile.kv_begin - want.kv_begin) % shape_.chunk_kv == 0, "inside a chunk");
      }
      require_of(tile, tile.partial_row == merge.first_partial_row + index * shape_.tile_q,
                 "state out of order");
    }
  }

  void check_costs() {
    std::vector<int64_t> cost(static_cast<size_t>(shape_.num_ctas), 0);
    for (const Piece& piece : pieces_) {
      const int64_t rows =
          int64_t{s_.segments[static_cast<size_t>(piece.tile.segment)].qo_len} * shape_.group_size;
      const int64_t first_row = int64_t{piece.tile.row_tile} * shape_.tile_q;
      const int64_t num_rows = std::min<int64_t>(shape_.tile_q, rows - first_row);
      int64_t& sum = cost[static_cast<size_t>(piece.cta)];
      if (piece.tile.merge >= 0) sum += slow_split_cost(shape_, num_rows);
      if (piece.tile.merge < 0 || piece.tile.num_kv_heads == 1) {
        sum += slow_cost(shape_, num_rows, piece.tile.kv_end - piece.tile.kv_begin);
      } else if (piece.heads_before == 0) {
        sum += cost_of_heads(piece, num_rows);
      }
    }
    for (size_t cta = 0; cta < cost.size(); ++cta) {
      require(cost[cta] == s_.cta_cost[cta], "cta_cost", cta, "is", s_.cta_cost[cta], "not",
              cost[cta]);
    }
  }

  /// What the heads of a piece cost together: the last piece gets what is left of whole steps of
  /// each head.
  int64_t cost_of_heads(const Piece& piece, int64_t num_rows) const {
    const WorkTile& tile = piece.tile;
    const int64_t without_steps = slow_cost(shape_, num_rows, 0);
    const int64_t of_step = slow_cost(shape_, num_rows, shape_.tile_kv) - without_steps;
    const int64_t before = (tile.kv_begin - piece.keys.begin) / step_of(tile);
    int64_t end = (tile.kv_end - piece.keys.begin) / step_of(tile);
    if (tile.kv_end == piece.keys.end) {
      end = tile.num_kv_heads * ceil_div(piece.keys.end - piece.keys.begin, shape_.tile_kv);
    }
    return tile.num_kv_heads * without_steps + (end - before) * of_step;
  }

  void check_slots() {
    // Chunks of few rows may lie side by side in a slot; other states have slots of their own.
    std::vector<std::pair<int64_t, int64_t>> states;  // the first partial row, and the number
    int64_t end = 0;
    for (const Merge& merge : s_.merges) {
      require(merge.num_pieces >= 2, "a merge of", merge.num_pieces, "pieces");
      const int64_t num_rows = shape_.chunk_kv > 0 ? merge.rows.num_rows : shape_.tile_q;
      for (int64_t i = 0; i < merge.num_states; ++i) {
        states.emplace_back(merge.first_partial_row + i * shape_.tile_q, num_rows);
      }
      const int64_t last_slot = merge.first_partial_row / shape_.tile_q + merge.num_states;
      end = std::max(end, last_slot * shape_.tile_q);
    }
    std::sort(states.begin(), states.end());
    for (size_t i = 1; i < states.size(); ++i) {
      require(states[i - 1].first + states[i - 1].second <= states[i].first, "states overlap at",
              states[i].first);
    }
    require(end == s_.num_partial_rows, "states end at", end, "not at", s_.num_partial_rows);
    const auto is_piece = [](const Piece& p) { return p.tile.merge >= 0 && p.heads_before == 0; };
    int64_t num_pieces = 0;
    for (const Merge& merge : s_.merges) num_pieces += merge.num_pieces;
    require(num_pieces == std::count_if(pieces_.begin(), pieces_.end(), is_piece),
            "a merge that no tile names");
  }

  const Schedule& s_;
  const Batch& batch_;
  const ScheduleShape& shape_;
  const ScheduleBounds& bounds_;
  std::vector<SlowRowTile> row_tiles_;
  std::vector<Piece> pieces_;
  std::string error_;
};

inline std::string schedule_violation(const Schedule& schedule, const Batch& batch,
                                      const ScheduleShape& shape, const ScheduleBounds& bounds) {
  return ScheduleChecker(schedule, batch, shape, bounds).violation();
}

}  // namespace flashplan::test
