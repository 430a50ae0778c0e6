// SPDX-License-Identifier: Apache-2.0
#include "plan/row_tiles.h"

#include <algorithm>

#include "plan/division.h"

namespace flashplan {
namespace {

/// The same as Mask::visible_to_queries(), for queries with ranges {begin, end} of their own.
KeySpan visible_in_ranges(const ScheduleShape& shape, const int32_t* ranges, int32_t first,
                          int32_t last, int32_t position, int32_t kv_len) {
  KeySpan all = {kv_len, 0};
  for (int32_t query = first; query <= last; ++query) {
    const int32_t* range = ranges + 2 * int64_t{query};
    const KeySpan own = {std::max(range[0], 0), std::min(range[1], kv_len)};
    const KeySpan keys = shape.mask.visible(position + query, own);
    if (keys.begin >= keys.end) continue;
    all = {std::min(all.begin, keys.begin), std::max(all.end, keys.end)};
  }
  const int32_t begin = all.begin / shape.tile_kv * shape.tile_kv;
  return begin < all.end ? KeySpan{begin, all.end} : KeySpan{0, 0};
}

}  // namespace

void RowTiles::reserve(const ScheduleShape& shape, int32_t max_requests, int32_t max_row_tiles) {
  shape_ = shape;
  tiles_.resize(static_cast<std::size_t>(max_row_tiles));
  groups_.resize(static_cast<std::size_t>(max_requests));
  order_.resize(static_cast<std::size_t>(max_row_tiles));
}

void RowTiles::collect(const Batch& batch, const PrefixTree& prefixes, Segment* segments) {
  // In locals: members would be read again after every tile that is written.
  const ScheduleShape shape = shape_;
  const int32_t queries_per_tile = shape.tile_q / shape.group_size;
  const int32_t heads_per_tile = shape.tile_q % shape.group_size;
  const Divisor of_step = make_divisor(shape.tile_kv);
  const bool shares = !prefixes.empty();
  RowTile* const tiles = tiles_.data();
  RowTile* next = tiles;
  std::size_t num_groups = 0;
  int64_t total_cost = 0;
  int64_t cost_of_readers = 0;
  int64_t kv_cumulated = 0;
  classes_.clear();
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    const int32_t qo_begin = batch.qo_indptr[r];
    const int32_t qo_len = batch.qo_indptr[r + 1] - qo_begin;
    const int32_t kv_len = batch.kv_lens[r];
    const int64_t kv_begin = batch.kv_indptr != nullptr ? batch.kv_indptr[r] : kv_cumulated;
    const int32_t position = kv_len - qo_len;  // of query 0 among the keys
    segments[r] = {qo_begin, qo_len, position, shape.paged ? r : static_cast<int32_t>(kv_begin)};
    kv_cumulated += kv_len;

    const int32_t* const ranges =
        batch.key_ranges != nullptr ? batch.key_ranges + 2 * int64_t{qo_begin} : nullptr;
    const int32_t sharer = shares ? prefixes.sharer_of(r) : -1;
    const int32_t num_rows = qo_len * shape.group_size;
    // A division takes longer than the comparison, and most requests decode.
    const int32_t num_tiles =
        num_rows <= shape.tile_q ? std::min(num_rows, 1) : ceil_divide(num_rows, shape.tile_q);
    const bool in_group = shape.item_steps > 0 && num_tiles > 1;
    if (in_group) groups_[num_groups++] = {static_cast<int32_t>(next - tiles), num_tiles};
    // The query and head of the first row of a tile advance by the same numbers: no division.
    int32_t query = 0;
    int32_t head = 0;
    for (int32_t t = 0; t < num_tiles; ++t) {
      const int32_t first_query = query;
      query += queries_per_tile;
      head += heads_per_tile;
      if (head >= shape.group_size) {
        head -= shape.group_size;
        ++query;
      }
      const int32_t last_query = std::min(query - (head == 0 ? 1 : 0), qo_len - 1);
      KeySpan keys =
          ranges == nullptr
              ? shape.mask.visible_to_queries(first_query, last_query, position, kv_len,
                                              shape.tile_kv)
              : visible_in_ranges(shape, ranges, first_query, last_query, position, kv_len);
      // The keys before are in prefixes, and seen by all of its rows.
      if (sharer >= 0) keys.begin = prefixes.first_own_key(r);
      const int32_t rows = std::min(num_rows - t * shape.tile_q, shape.tile_q);
      const int32_t steps = ceil_divide(keys.end - keys.begin, of_step);
      int64_t cost = shape.cost.of_tile(rows) + steps * shape.cost.of_step(rows);
      if (sharer >= 0) {
        cost += shape.cost.of_write(rows) + shape.cost.of_merge();
        cost_of_readers += cost;
      }
      const uint16_t cost_class = in_group ? CostClasses::kLast : CostClasses::of(cost);
      classes_.add(cost_class);
      total_cost += cost;
      *next++ = {cost, r, t, keys, static_cast<uint16_t>(rows), cost_class, sharer};
    }
  }
  num_groups_ = num_groups;
  first_prefix_ = static_cast<std::size_t>(next - tiles);
  num_prefixes_ = 0;
  cost_of_prefixes_ = 0;
  if (shares && !shape.prefixes_first()) next = collect_prefixes(batch, prefixes, segments, next);
  const auto num_row_tiles = static_cast<int32_t>(next - tiles);
  num_ordered_ = order_by_class(0, num_row_tiles);
  if (shares && shape.prefixes_first()) {
    classes_.clear();
    next = collect_prefixes(batch, prefixes, segments, next);
    num_prefixes_ = static_cast<std::size_t>(next - tiles) - first_prefix_;
    order_by_class(num_row_tiles, static_cast<int32_t>(next - tiles));
  }
  cost_of_readers_ = cost_of_readers * shape.num_kv_heads;
  total_cost_ = total_cost * shape.num_kv_heads + cost_of_prefixes_;
}

/// Writes those of prefixes from `next` on, and returns where they end.
RowTile* RowTiles::collect_prefixes(const Batch& batch, const PrefixTree& prefixes,
                                    Segment* segments, RowTile* next) {
  int32_t segment = batch.batch_size;
  int32_t sharer = prefixes.num_requests();
  for (const SharedPrefix& prefix : prefixes.prefixes()) {
    const int32_t first = prefix.first_request;
    const int32_t end = first + prefix.num_requests;
    const int32_t qo_begin = batch.qo_indptr[first];
    segments[segment] = {qo_begin, batch.qo_indptr[end] - qo_begin, kPrefixPosition,
                         segments[first].kv_row};
    const int32_t rows = prefix.num_rows;
    const int32_t steps = (prefix.keys.end - prefix.keys.begin) / shape_.tile_kv;
    const CostModel& model = shape_.cost;
    const int64_t cost = model.of_tile(rows) + steps * model.of_step(rows) + model.of_write(rows);
    const uint16_t cost_class = CostClasses::of(cost);
    classes_.add(cost_class);
    cost_of_prefixes_ += cost * shape_.num_kv_heads;
    *next++ = {cost, segment++, 0, prefix.keys, static_cast<uint16_t>(rows), cost_class, sharer++};
  }
  return next;
}

/// Orders row tiles [first, end), whose classes have been added. Returns how many are in no group.
std::size_t RowTiles::order_by_class(int32_t first, int32_t end) {
  classes_.start();
  const auto num_ordered = static_cast<std::size_t>(classes_.begin(CostClasses::kLast));
  const RowTile* const tiles = tiles_.data();
  int32_t* const order = order_.data() + first;
  for (int32_t i = first; i < end; ++i) order[classes_.place(tiles[i].cost_class)] = i;
  return num_ordered;
}

}  // namespace flashplan
