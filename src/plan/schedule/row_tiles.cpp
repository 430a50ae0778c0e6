// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule/row_tiles.h"

#include <algorithm>

#include "plan/schedule/division.h"

namespace flashplan {
namespace {

void write_segments(const Batch& batch, bool paged, Segment* segments) {
  const int32_t* const qo = batch.qo_indptr;
  const int32_t* const kv_lens = batch.kv_lens;
  const auto segment = [&](int32_t r, int32_t kv_row) {
    const int32_t qo_len = qo[r + 1] - qo[r];
    return Segment{qo[r], qo_len, kv_lens[r] - qo_len, kv_row};
  };
  if (paged) {
    for (int32_t r = 0; r < batch.batch_size; ++r) segments[r] = segment(r, r);
    return;
  }
  int32_t kv_begin = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    segments[r] = segment(r, batch.kv_indptr != nullptr ? batch.kv_indptr[r] : kv_begin);
    kv_begin += kv_lens[r];
  }
}

/// The result of visible_keys() for queries with ranges {begin, end} of their own. Few batches have
/// ranges, and those without are planned faster if this is not inlined.
[[gnu::noinline]] KeySpan visible_in_ranges(const ScheduleShape& shape, const int32_t* ranges,
                                            int32_t first, int32_t last, int32_t position,
                                            int32_t kv_len) {
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

/// The span from the first to the last key that any of queries `first` to `last` of a request sees.
/// Its begin is rounded down to a multiple of tile_kv, where a step of the kernel begins.
KeySpan visible_keys(const ScheduleShape& shape, const Batch& batch, const Segment& request,
                     int32_t first, int32_t last) {
  const int32_t kv_len = request.position + request.qo_len;
  if (batch.key_ranges == nullptr) {
    return shape.mask.visible_to_queries(first, last, request.position, kv_len, shape.tile_kv);
  }
  const int32_t* const ranges = batch.key_ranges + 2 * int64_t{request.qo_begin};
  return visible_in_ranges(shape, ranges, first, last, request.position, kv_len);
}

}  // namespace

void RowTiles::reserve(const ScheduleShape& shape, int32_t max_requests, int32_t max_row_tiles) {
  shape_ = shape;
  costs_.clear();
  for (int32_t rows = 0; rows <= shape.tile_q; ++rows) {
    const CostModel& cost = shape.cost;
    costs_.push_back({cost.of_tile(rows), cost.of_step(rows), cost.of_split(rows),
                      cost.of_write(rows), cost.of_merge(rows)});
  }
  tiles_.resize(static_cast<std::size_t>(max_row_tiles));
  groups_.resize(static_cast<std::size_t>(max_requests));
  order_.resize(static_cast<std::size_t>(max_row_tiles));
}

/// The state of collect(). It is a local object, which the compiler keeps in registers. Members of
/// RowTiles would be read from memory again after every tile that is written, since the write might
/// have changed them.
class RowTiles::Collector {
 public:
  explicit Collector(RowTiles& row_tiles)
      : costs_(row_tiles.costs_.data()),
        of_step_(make_divisor(row_tiles.shape_.tile_kv)),
        classes_(&row_tiles.classes_),
        next_(row_tiles.tiles_.data()) {}

  /// Adds a row tile of `rows` query rows. `sharer`: the number that PrefixTree gives the request
  /// if it reads shared prefixes, else -1. `in_group`: whether the tile is in a RowTileGroup.
  void add(int32_t request, int32_t row_tile, int32_t rows, KeySpan keys, int32_t sharer,
           bool in_group) {
    const int32_t steps = ceil_divide(keys.end - keys.begin, of_step_);
    const RowCosts& of = costs_[rows];
    int64_t cost = of.tile + steps * of.step;
    if (sharer >= 0) {
      cost += of.write + of.merge;
      cost_of_readers_ += cost;
    }
    const uint16_t cost_class = in_group ? CostClasses::kLast : CostClasses::of(cost);
    classes_->add(cost_class);
    total_cost_ += cost;
    *next_++ = {cost, request, row_tile, keys, static_cast<uint16_t>(rows), cost_class, sharer};
  }

  RowTile* next() const { return next_; }
  // Summed costs of one kv head of the added tiles; readers are requests that read prefixes:
  int64_t total_cost() const { return total_cost_; }
  int64_t cost_of_readers() const { return cost_of_readers_; }

 private:
  const RowCosts* costs_;
  Divisor of_step_;
  CostClasses* classes_;
  RowTile* next_;
  int64_t total_cost_ = 0;
  int64_t cost_of_readers_ = 0;
};

void RowTiles::collect(const Batch& batch, const PrefixTree& prefixes, Segment* segments,
                       const SharingMerges& sharing) {
  write_segments(batch, shape_.paged, segments);
  const ScheduleShape shape = shape_;
  const bool shares = !prefixes.empty();
  // Without a window or ranges, the last query of a request sees all keys of the request, so
  // visible_keys() need not be called.
  const bool hides_keys = shape.mask.window_left >= 0 || batch.key_ranges != nullptr;
  classes_.clear();
  num_groups_ = 0;
  Collector collector(*this);
  SharingMergesWriter merges(sharing, prefixes, shape.num_kv_heads);
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    const Segment request = segments[r];
    const int32_t num_rows = request.qo_len * shape.group_size;
    if (num_rows < shape.min_rows || num_rows > shape.max_rows) continue;
    if (num_rows > shape.tile_q) {
      collector = collect_tiles(batch, r, request, collector);
    } else {
      KeySpan keys = {0, request.position + request.qo_len};
      if (hides_keys) keys = visible_keys(shape, batch, request, 0, request.qo_len - 1);
      const int32_t sharer = shares ? prefixes.sharer_of(r) : -1;
      if (sharer >= 0) {
        // The keys before first_own_key() are the prefixes' keys. All rows of the request see them,
        // and the prefixes' own row tiles compute them.
        keys.begin = prefixes.first_own_key(r);
        // All merges together are larger than the L1 cache, so writing them waits for L2. They are
        // written here, one request at a time, so that the rest of this loop goes on meanwhile.
        merges.add_request(r, request.qo_begin, num_rows, prefixes.prefix_of(r));
      }
      collector.add(r, 0, num_rows, keys, sharer, false);
    }
  }
  RowTile* const tiles = tiles_.data();
  RowTile* next = collector.next();
  first_prefix_ = static_cast<std::size_t>(next - tiles);
  num_prefixes_ = 0;
  cost_of_prefixes_ = 0;
  if (shares && !shape.prefixes_first())
    next = collect_prefixes(batch, prefixes, segments, merges, next);
  const auto num_row_tiles = static_cast<int32_t>(next - tiles);
  num_ordered_ = order_by_class(0, num_row_tiles);
  if (shares && shape.prefixes_first()) {
    classes_.clear();
    next = collect_prefixes(batch, prefixes, segments, merges, next);
    num_prefixes_ = static_cast<std::size_t>(next - tiles) - first_prefix_;
    order_by_class(num_row_tiles, static_cast<int32_t>(next - tiles));
  }
  cost_of_readers_ = collector.cost_of_readers() * shape.num_kv_heads;
  total_cost_ = collector.total_cost() * shape.num_kv_heads + cost_of_prefixes_;
}

/// Adds the row tiles of a request that has several to `collector`, and returns the collector. Such
/// a request shares no prefix.
RowTiles::Collector RowTiles::collect_tiles(const Batch& batch, int32_t request,
                                            const Segment& segment, Collector collector) {
  const ScheduleShape shape = shape_;
  const int32_t queries_per_tile = shape.tile_q / shape.group_size;
  const int32_t heads_per_tile = shape.tile_q % shape.group_size;
  const int32_t num_rows = segment.qo_len * shape.group_size;
  const int32_t num_tiles = ceil_divide(num_rows, shape.tile_q);
  const bool in_group = shape.item_steps > 0;
  if (in_group) {
    groups_[num_groups_++] = {static_cast<int32_t>(collector.next() - tiles_.data()), num_tiles};
  }
  // `query` and `head` are those of a tile's first row. They are found by adding queries_per_tile
  // and heads_per_tile for each tile, which saves a division.
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
    const int32_t last_query = std::min(query - (head == 0 ? 1 : 0), segment.qo_len - 1);
    const KeySpan keys = visible_keys(shape, batch, segment, first_query, last_query);
    const int32_t rows = std::min(num_rows - t * shape.tile_q, shape.tile_q);
    collector.add(request, t, rows, keys, -1, in_group);
  }
  return collector;
}

/// Writes the row tiles of prefixes to an array that begins at `next`. Returns the end of the
/// array.
RowTile* RowTiles::collect_prefixes(const Batch& batch, const PrefixTree& prefixes,
                                    Segment* segments, SharingMergesWriter merges, RowTile* next) {
  int32_t segment = batch.batch_size;
  int32_t sharer = prefixes.num_requests();
  for (const SharedPrefix& prefix : prefixes.prefixes()) {
    const int32_t first = prefix.first_request;
    const int32_t end = first + prefix.num_requests;
    const int32_t qo_begin = batch.qo_indptr[first];
    merges.add_prefix(segment, qo_begin, prefix);
    segments[segment] = {qo_begin, batch.qo_indptr[end] - qo_begin, kPrefixPosition,
                         segments[first].kv_row};
    const int32_t rows = prefix.num_rows;
    const int32_t steps = (prefix.keys.end - prefix.keys.begin) / shape_.tile_kv;
    const RowCosts& of = costs(rows);
    const int64_t cost = of.tile + steps * of.step + of.write;
    const uint16_t cost_class = CostClasses::of(cost);
    classes_.add(cost_class);
    cost_of_prefixes_ += cost * shape_.num_kv_heads;
    *next++ = {cost, segment++, 0, prefix.keys, static_cast<uint16_t>(rows), cost_class, sharer++};
  }
  return next;
}

/// Orders row tiles [first, end) by their cost classes, which have been added to classes_. Returns
/// how many of them are in no group.
std::size_t RowTiles::order_by_class(int32_t first, int32_t end) {
  classes_.start();
  const auto num_ordered = static_cast<std::size_t>(classes_.begin(CostClasses::kLast));
  const RowTile* const tiles = tiles_.data();
  int32_t* const order = order_.data() + first;
  for (int32_t i = first; i < end; ++i) order[classes_.place(tiles[i].cost_class)] = i;
  return num_ordered;
}

}  // namespace flashplan
