// SPDX-License-Identifier: Apache-2.0
// Runs a schedule without arithmetic, and counts how often each row of the output gets each key. It
// uses only the records of the schedule, no code of the planner; whether requests share a key, it
// decides by the groups of the batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "plan/schedule/schedule.h"
#include "random_batch.h"
#include "slow_planner.h"

namespace flashplan::test {

class ScheduleRun {
 public:
  ScheduleRun(const Schedule& schedule, const Batch& batch, const ScheduleShape& shape)
      : s_(schedule), batch_(batch), shape_(shape) {}

  /// Runs all work tiles in a random order. Empty if every row is written once, from each key that
  /// it sees once; else what is wrong.
  std::string violation(uint64_t seed) {
    const int64_t most_rows = int64_t{shape_.max_partial_slots} * shape_.tile_q;
    require(s_.num_partial_rows <= most_rows, "more partial rows than", most_rows);
    if (!error_.empty()) return error_;
    partial_.assign(static_cast<size_t>(s_.num_partial_rows), {});
    arrivals_.assign(s_.merges.size(), 0);
    const int64_t num_rows = int64_t{batch_.qo_indptr[batch_.batch_size]} * shape_.group_size;
    times_written_.assign(static_cast<size_t>(num_rows * shape_.num_kv_heads), 0);
    for (int32_t r = 0; r < batch_.batch_size; ++r) {
      request_of_.resize(static_cast<size_t>(batch_.qo_indptr[r + 1]), r);
    }

    std::vector<WorkTile> tiles(s_.tiles.begin(), s_.tiles.end());
    Random random(seed);
    for (size_t i = tiles.size(); i > 1; --i) {
      std::swap(tiles[i - 1],
                tiles[static_cast<size_t>(random.between(0, static_cast<int32_t>(i) - 1))]);
    }
    check_splits();
    for (const WorkTile& tile : tiles) {
      run(tile);
      if (!error_.empty()) return error_;
    }
    for (const int32_t times : times_written_) require(times == 1, "a row is written", times);
    for (size_t m = 0; m < arrivals_.size(); ++m) {
      require(arrivals_[m] == s_.merges[m].num_pieces, "arrivals at merge", m, ":", arrivals_[m]);
    }
    return error_;
  }

 private:
  /// The row and the keys that one state was computed from.
  struct State {
    int64_t row = -1;  // packed, of the whole batch
    int32_t head = 0;
    int32_t segment = 0;
    KeySpan keys = {};
  };

  template <class... Parts>
  void require(bool condition, const Parts&... parts) {
    if (condition || !error_.empty()) return;
    std::ostringstream out;
    ((out << parts << ' '), ...);
    error_ = out.str();
  }

  void check_splits() {
    for (size_t cta = 0; cta + 1 < s_.cta_indptr.size(); ++cta) {
      int32_t num_splits = 0;
      for (int32_t i = s_.cta_indptr[cta]; i < s_.cta_indptr[cta + 1]; ++i) {
        const WorkTile& tile = s_.tiles[static_cast<size_t>(i)];
        if (tile.merge >= 0 && !is_of_sharer(tile.merge)) ++num_splits;
      }
      require(num_splits <= kMostSplitsPerQueue, num_splits, "splits in queue", cta);
    }
  }

  void run(const WorkTile& tile) {
    const auto num_segments = static_cast<int32_t>(s_.segments.size());
    require(tile.segment >= 0 && tile.segment < num_segments, "no segment", tile.segment);
    if (!error_.empty()) return;
    const Segment& segment = s_.segments[static_cast<size_t>(tile.segment)];
    const int32_t row_begin = tile.row_tile * shape_.tile_q;
    const int32_t num_rows =
        std::min(shape_.tile_q, segment.qo_len * shape_.group_size - row_begin);
    require(num_rows > 0, "a tile without rows");
    const int32_t step = tile.merge >= 0 && !is_of_sharer(tile.merge) && error_.empty()
                             ? shape_.tile_kv / tile.num_kv_heads
                             : shape_.tile_kv;
    require(tile.kv_begin % step == 0, "a tile begins inside of a step, at", tile.kv_begin);
    const int64_t first = int64_t{segment.qo_begin} * shape_.group_size + row_begin;
    for (int32_t h = 0; h < tile.num_kv_heads && error_.empty(); ++h) {
      const int32_t head = tile.kv_head + h;
      if (tile.merge < 0) {
        for (int32_t r = 0; r < num_rows; ++r) {
          write(first + r, head, {{first + r, head, tile.segment, {tile.kv_begin, tile.kv_end}}});
        }
        continue;
      }
      int32_t begin = tile.kv_begin;
      for (int32_t i = 0; begin < tile.kv_end; ++i) {
        const int32_t length = shape_.chunk_kv > 0 ? shape_.chunk_kv : tile.kv_end;
        const int32_t end = tile.kv_end - begin > length ? begin + length : tile.kv_end;
        const int64_t to = int64_t{tile.partial_row} + h * num_rows + i * shape_.tile_q;
        for (int32_t r = 0; r < num_rows; ++r) {
          State* state = partial(to + r);
          if (state == nullptr) return;
          require(state->row < 0, "partial row", to + r, "is written twice");
          *state = {first + r, head, tile.segment, {begin, end}};
        }
        begin = end;
      }
      if (is_of_sharer(tile.merge)) arrive(tile.merge + h, 1);
    }
    if (tile.merge >= 0 && error_.empty() && !is_of_sharer(tile.merge)) {
      arrive(tile.merge, tile.num_kv_heads);
    }
  }

  /// Whether a merge is that of a sharer. Other merges are of all heads of their work tiles.
  bool is_of_sharer(int32_t number) {
    const Merge* of = merge(number);
    return of != nullptr && (of->parent >= 0 || of->num_readers > 0);
  }

  State* partial(int64_t row) {
    require(row >= 0 && row < s_.num_partial_rows, "no partial row", row);
    return error_.empty() ? &partial_[static_cast<size_t>(row)] : nullptr;
  }

  const Merge* merge(int32_t number) {
    const int64_t index = int64_t{number} - s_.first_merge;
    require(index >= 0 && index < static_cast<int64_t>(s_.merges.size()), "no merge", number);
    return error_.empty() ? &s_.merges[static_cast<size_t>(index)] : nullptr;
  }

  void arrive(int32_t number, int32_t num_heads) {
    const Merge* of = merge(number);
    if (of == nullptr) return;
    if (++arrivals_[static_cast<size_t>(number - s_.first_merge)] != of->num_pieces) return;
    for (int32_t i = 0; i < of->num_readers; ++i) arrive(of->first_reader + i * of->reader_step, 1);
    if (of->num_readers > 0) return;
    for (int32_t h = 0; h < num_heads; ++h) {
      for (int32_t r = 0; r < of->rows.num_rows && error_.empty(); ++r) merge_row(of, h, r);
    }
  }

  /// Row r of head h of a merge; of its sharers' merges there is one head each.
  void merge_row(const Merge* of, int32_t h, int32_t r) {
    const int64_t row = int64_t{of->rows.qo_begin} * shape_.group_size + of->rows.row_begin + r;
    std::vector<State> states;
    for (const Merge* from = of; from != nullptr;
         from = from->parent < 0 ? nullptr : merge(from->parent)) {
      const int64_t in_rows =
          row - int64_t{from->rows.qo_begin} * shape_.group_size - from->rows.row_begin;
      require(in_rows >= 0 && in_rows < from->rows.num_rows, "a parent without the row");
      require(from->kv_head == of->kv_head, "a parent of another head");
      for (int32_t i = 0; i < from->num_states; ++i) {
        const State* state = partial(from->first_partial_row + int64_t{i} * shape_.tile_q +
                                     h * of->rows.num_rows + in_rows);
        if (state == nullptr) return;
        states.push_back(*state);
      }
    }
    write(row, of->kv_head + h, std::move(states));
  }

  void write(int64_t row, int32_t head, std::vector<State> states) {
    const auto index = static_cast<size_t>(row * shape_.num_kv_heads + head);
    require(index < times_written_.size(), "no row", row);
    if (!error_.empty()) return;
    ++times_written_[index];
    const auto token = static_cast<int32_t>(row / shape_.group_size);
    const int32_t request = request_of_[static_cast<size_t>(token)];
    const int32_t qo_len = batch_.qo_indptr[request + 1] - batch_.qo_indptr[request];
    const int32_t kv_len = batch_.kv_lens[request];
    RowKeys sees = row_keys(shape_, qo_len, kv_len, token - batch_.qo_indptr[request]);
    std::sort(states.begin(), states.end(),
              [](const State& a, const State& b) { return a.keys.begin < b.keys.begin; });
    for (const State& state : states) {
      require(state.row == row && state.head == head, "row", row, "gets a state of row", state.row,
              "head", state.head);
      if (state.segment >= batch_.batch_size) {
        const Segment& prefix = s_.segments[static_cast<size_t>(state.segment)];
        const int32_t owner = request_of_[static_cast<size_t>(prefix.qo_begin)];
        require(state.keys.end <= kv_len - qo_len, "a prefix that the row does not see");
        require(prefix.position >= state.keys.end - 1, "a prefix that is masked");
        require(shares(owner, request, state.keys.end), "request", request, "gets keys of", owner,
                "up to", state.keys.end);
        const Segment& own = s_.segments[static_cast<size_t>(owner)];
        require(prefix.kv_row == own.kv_row, "a prefix is not where its first request's keys are");
      } else {
        require(state.segment == request, "keys of request", state.segment);
      }
      // Parts of a tile that this row does not see are masked.
      const int64_t begin = std::max<int64_t>(state.keys.begin, sees.begin);
      const int64_t end = std::min<int64_t>(state.keys.end, sees.end);
      if (begin >= end) continue;
      require(begin == sees.begin, "request", request, "gets key", begin, "and expected",
              sees.begin);
      sees.begin = end;
    }
    require(sees.begin >= sees.end, "request", request, "does not get key", sees.begin);
  }

  bool shares(int32_t a, int32_t b, int32_t num_tokens) const {
    for (int32_t i = 0; i < batch_.num_shared_prefixes; ++i) {
      const int32_t* group = batch_.shared_prefixes + 3 * i;
      const auto has = [&](int32_t r) { return r >= group[0] && r < group[0] + group[1]; };
      if (has(a) && has(b) && group[2] >= num_tokens) return true;
    }
    return false;
  }

  const Schedule& s_;
  const Batch& batch_;
  const ScheduleShape& shape_;
  std::vector<State> partial_;
  std::vector<int32_t> arrivals_;
  std::vector<int32_t> times_written_;  // [packed row, kv head]
  std::vector<int32_t> request_of_;     // of each token
  std::string error_;
};

}  // namespace flashplan::test
