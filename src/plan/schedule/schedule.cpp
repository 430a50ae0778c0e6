// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule/schedule.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "plan/schedule/division.h"
#include "plan/schedule/schedule_tuning.h"

namespace flashplan {
namespace {

/// Writes the pieces of cut items that queue `cta` has, from tiles[next] on. The queue's first and
/// last piece may be parts of a split head. Such a piece is written first, so that its merge
/// overlaps with the other work tiles. Leaves room for the queue's uncut items: before the other
/// pieces if `whole_first`, else after them. next_whole[cta] is the number of uncut items, and
/// becomes the index of the first one in `tiles`. Returns the index after the queue. It is inlined
/// to save a call for each queue, since a queue has few pieces.
[[gnu::always_inline]] inline int32_t write_pieces(const QueueFiller& filler, int32_t cta,
                                                   bool whole_first, int32_t* next_whole,
                                                   int32_t next, WorkTile* tiles) {
  const std::span<const WorkTile> pieces = filler.cutter().pieces_of(cta);
  const WorkTile* piece = pieces.data();
  const WorkTile* end = piece + pieces.size();
  if (piece < end && piece->merge >= 0) tiles[next++] = *piece++;
  if (piece < end && end[-1].merge >= 0) tiles[next++] = *--end;
  const auto num_pieces = static_cast<int32_t>(end - piece);
  const int32_t num_whole = next_whole[cta];
  next_whole[cta] = whole_first ? next : next + num_pieces;
  WorkTile* to = tiles + (whole_first ? next + num_whole : next);
  while (piece < end) *to++ = *piece++;
  return next + num_pieces + num_whole;
}

}  // namespace

ScheduleBounds schedule_bounds(const ScheduleShape& shape, int32_t max_batch_size,
                               int32_t max_qo_tokens) {
  const int64_t max_rows = int64_t{max_qo_tokens} * shape.group_size;
  const auto row_tiles = static_cast<int32_t>(max_batch_size + max_rows / shape.tile_q);
  const int32_t least_heads = least_heads_per_item(shape, row_tiles);
  const int32_t sharers =
      shape.shares_prefixes ? most_sharing(max_batch_size, shape.num_kv_heads) : 0;
  const int32_t prefixes = std::min(sharers, max_batch_size);
  const int32_t tiles = row_tiles + prefixes;
  // Items of sharers (prefixes, and requests that read them) may have fewer heads than other items,
  // so that each queue gets about one. So there is room for two more items for each queue.
  const int32_t items = tiles * ((shape.num_kv_heads + least_heads - 1) / least_heads) +
                        (shape.shares_prefixes ? 2 * shape.num_ctas : 0);
  // A queue is cut at most once. A cut replaces a work tile by at most four: the heads before, two
  // pieces of a head, the heads after. Prefixes that come first are divided, and cut, separately.
  const int32_t divisions = shape.shares_prefixes && shape.prefixes_first() ? 2 : 1;
  return {.requests = max_batch_size,
          .segments = max_batch_size + prefixes,
          .row_tiles = tiles,
          .items = items,
          .work_tiles = items + 3 * shape.num_ctas * divisions,
          .merges = shape.num_ctas + sharers * shape.num_kv_heads};
}

ScheduleBounds larger(const ScheduleBounds& a, const ScheduleBounds& b) {
  return {.requests = std::max(a.requests, b.requests),
          .segments = std::max(a.segments, b.segments),
          .row_tiles = std::max(a.row_tiles, b.row_tiles),
          .items = std::max(a.items, b.items),
          .work_tiles = std::max(a.work_tiles, b.work_tiles),
          .merges = std::max(a.merges, b.merges),
          .mask_begins = std::max(a.mask_begins, b.mask_begins),
          .prepared_tiles = std::max(a.prepared_tiles, b.prepared_tiles)};
}

void Scheduler::reserve(const ScheduleShape& shape, const ScheduleBounds& bounds) {
  shape_ = shape;
  const int32_t prefixes = bounds.segments - bounds.requests;
  const auto num_ctas = static_cast<std::size_t>(shape.num_ctas);
  schedule_ = Schedule();
  schedule_.cta_indptr.assign(num_ctas + 1, 0);
  schedule_.cta_cost.assign(num_ctas, 0);
  max_merges_ = bounds.merges;
  prefixes_.reserve(shape, bounds.requests);
  row_tiles_.reserve(shape, bounds.segments, bounds.row_tiles);
  filler_.reserve(shape, bounds.items, bounds.work_tiles, bounds.row_tiles - prefixes);
  next_whole_.resize(num_ctas);
  if (!shape.shares_prefixes || !shape.prefixes_first()) return;
  const int32_t items = prefixes * shape.num_kv_heads;
  prefix_filler_.reserve(shape, items, items + 3 * shape.num_ctas, bounds.row_tiles - prefixes);
  next_whole_prefix_.resize(num_ctas);
  prefix_loads_.resize(num_ctas);
}

void Scheduler::take_rows(int32_t least, int32_t most) noexcept {
  shape_.min_rows = least;
  shape_.max_rows = most;
  row_tiles_.take_rows(least, most);
}

void Scheduler::make(const Batch& batch, std::span<const PrefixGroup> groups,
                     const ScheduleMemory& memory) {
  memory_ = memory;
  gains_by_prefixes_ = false;
  prefixes_.build(batch, groups);
  schedule_batch(batch);
  if (prefixes_.empty()) return;
  // Sharing means less work, but in larger tiles. It may take longer if these tiles can not be
  // divided among all CTAs.
  const int64_t with = modelled_time();
  gains_by_prefixes_ = with <= (schedule_.total_cost + schedule_.saved_cost) / shape_.num_ctas;
  if (gains_by_prefixes_) return;
  const int64_t cached = prefixes_.cached_cost() / shape_.num_ctas;
  prefixes_.clear();
  schedule_batch(batch);
  if (modelled_time() - cached <= with) return;
  prefixes_.build(batch, groups);
  schedule_batch(batch);
}

void Scheduler::schedule_batch(const Batch& batch) {
  sharing_ = {memory_.merges, merges_end() - prefixes_.num_sharers() * shape_.num_kv_heads,
              prefixes_.num_partial_rows()};
  row_tiles_.collect(batch, prefixes_, memory_.segments, sharing_);
  schedule_.prefixes = prefixes_.prefixes();
  schedule_.segments = {memory_.segments,
                        static_cast<std::size_t>(batch.batch_size) + schedule_.prefixes.size()};
  schedule_.total_cost = row_tiles_.total_cost();
  schedule_.saved_cost = prefixes_.saved_cost();
  divide();
  write_queues();
}

/// Divides the row tiles among the queues: first the row tiles of prefixes, if these come first in
/// the queues, then all others.
void Scheduler::divide() {
  SharingMerges sharing = sharing_;
  std::span<const int64_t> loads;
  int32_t num_sharers = prefixes_.empty() ? 0 : prefixes_.num_sharers();
  schedule_.num_cut = 0;
  if (has_prefixes_first()) {
    const int32_t num_prefixes = num_sharers - prefixes_.num_requests();
    const int64_t capacity = capacity_of_prefixes();
    prefix_filler_.fill({.row_tiles = row_tiles_,
                         .groups = {},
                         .longest_first = row_tiles_.prefixes_longest_first(),
                         .cost = row_tiles_.cost_of_prefixes(),
                         .num_sharers = num_prefixes,
                         .queues_wait = capacity == 0,
                         .capacity = capacity},
                        memory_.segments, sharing);
    const Cutter& cutter = prefix_filler_.cutter();
    sharing.num_partial_rows = cutter.num_partial_rows();
    schedule_.num_cut = cutter.num_cut();
    num_sharers -= num_prefixes;
    loads = capacity > 0 ? prefix_filler_.loads() : loads_of_prefixes();
  }
  TileSet tiles = {
      .row_tiles = row_tiles_,
      .groups = row_tiles_.groups(),
      .longest_first = row_tiles_.longest_first(),
      .cost = row_tiles_.total_cost() - (loads.empty() ? 0 : row_tiles_.cost_of_prefixes()),
      .num_sharers = num_sharers};
  const LittleWork little = little_work(tiles);
  tiles.queues_wait = little.queues_wait;
  filler_.take_queues(little.num_queues);
  filler_.fill(tiles, memory_.segments, sharing, loads);
  const std::span<const int64_t> ends = filler_.loads();
  for (std::size_t c = 0; c < ends.size(); ++c) {
    const int64_t idle = loads.empty() ? 0 : loads[c] - prefix_filler_.loads()[c];
    schedule_.cta_cost[c] = ends[c] - idle;
  }
  std::fill(schedule_.cta_cost.begin() + little.num_queues, schedule_.cta_cost.end(), 0);
}

/// How a batch is divided that has little work for each queue. If a tile of `steps` steps is cut
/// into pieces of s steps that run at the same time, the pieces take s * of_step(), and the merge
/// of their states takes steps / s * of_state(). The sum is least for s = sqrt(steps * of_state() /
/// of_step()). Only so many queues are used that each gets a piece of about that length, but at
/// least one for each head of a row tile, if there are enough. If the work of a queue costs less
/// than a cut, queues_wait is set: all CTAs then wait for the merge, which begins when the longest
/// piece has ended.
Scheduler::LittleWork Scheduler::little_work(const TileSet& tiles) const {
  const LittleWork none = {shape_.num_ctas, false};
  const bool cuts_freely = shape_.cuts && shape_.chunk_kv == 0 && prefixes_.empty();
  if (!cuts_freely || shape_.cost.of_state(shape_.tile_q) == 0) return none;
  const RowTile* longest = tiles.longest();
  if (longest == nullptr) return none;
  const RowCosts& of = row_tiles_.costs(longest->num_rows);
  const auto steps = static_cast<double>((longest->head_cost - of.tile) / of.step);
  const auto state = static_cast<double>(shape_.cost.of_state(longest->num_rows));
  const auto best = static_cast<int64_t>(std::sqrt(steps * state / static_cast<double>(of.step)));
  const int64_t num_uncut = int64_t{tiles.num_row_tiles()} * shape_.num_kv_heads;
  const int64_t of_steps = tiles.cost - num_uncut * of.tile;
  const int64_t piece = std::max<int64_t>(best, 1) * of.step;
  const int64_t num_pieces = std::max((of_steps + piece - 1) / piece, num_uncut);
  const auto num_queues = static_cast<int32_t>(std::clamp<int64_t>(num_pieces, 1, shape_.num_ctas));
  return {num_queues, of_steps / num_queues < of.split};
}

/// The largest cost of prefixes that a queue may get, or 0 to divide prefixes evenly among all
/// queues. An even division cuts short prefixes into many pieces, and each piece costs time: it has
/// a fixed cost, and each request of the prefix has one more partial result to merge. If CTAs merge
/// requests at the ends of their queues (merges_readers_last), fewer and longer pieces will do,
/// because prefixes need to be complete only at that time. Then the longest prefix is cut into
/// equal pieces of at most ScheduleTuning::prefix_steps steps. A queue gets at most the cost of one
/// such piece of prefixes, and requests fill the rest of the queue. A piece must be a small part of
/// a queue, so that prefixes are complete at the ends of the queues even if the predicted costs are
/// wrong; otherwise the result is 0.
int64_t Scheduler::capacity_of_prefixes() const {
  constexpr ScheduleTuning kTuning = kScheduleTuning;
  if (!shape_.merges_readers_last) return 0;
  const RowTile& longest = row_tiles_[row_tiles_.prefixes_longest_first()[0]];
  const RowCosts& of = row_tiles_.costs(longest.num_rows);
  const int64_t fixed = of.tile + of.write;
  const int64_t steps = (longest.head_cost - fixed) / of.step;
  const int64_t pieces = (steps - 1) / kTuning.prefix_steps + 1;
  const int64_t capacity = fixed + ((steps - 1) / pieces + 1) * of.step;
  const int64_t all_queues = capacity * shape_.num_ctas;
  const bool is_short = row_tiles_.cost_of_prefixes() < all_queues;
  const bool is_small = kTuning.queue_to_prefixes * all_queues <= row_tiles_.total_cost();
  return is_short && is_small ? capacity : 0;
}

/// The cost that each queue counts as having before requests are divided among the queues. It is
/// the predicted cost of the queue's prefixes, so a queue whose prefixes end early gets more
/// requests. These should not read a prefix that another queue is still computing: they would end
/// before the prefix, and the one CTA that ends the prefix would have to merge all of them. So if
/// the requests that read no prefix are too few for the queues that end early, all queues count as
/// having the cost of the longest queue.
std::span<const int64_t> Scheduler::loads_of_prefixes() {
  const std::span<const int64_t> loads = prefix_filler_.loads();
  const int64_t longest = *std::max_element(loads.begin(), loads.end());
  const int64_t idle =
      longest * shape_.num_ctas - std::accumulate(loads.begin(), loads.end(), int64_t{0});
  const int64_t others = row_tiles_.total_cost() - row_tiles_.cost_of_sharers();
  if (idle <= others) return loads;
  std::fill(prefix_loads_.begin(), prefix_loads_.end(), longest);
  return prefix_loads_;
}

/// The predicted time of the CTA that ends last. If prefixes come first in the queues, as on a GPU,
/// this is an upper bound, with the costs of sharing and the error of the prediction.
int64_t Scheduler::modelled_time() const {
  const std::span<const int64_t> ends = filler_.loads();
  const int64_t longest = *std::max_element(ends.begin(), ends.end());
  if (!has_prefixes_first()) return longest;
  const auto num_heads = static_cast<std::size_t>(shape_.num_kv_heads);
  const Merge* const of_prefixes =
      memory_.merges + sharing_.first + prefixes_.num_requests() * shape_.num_kv_heads;
  int64_t rows = 0;
  for (const Merge& merge : std::span(of_prefixes, prefixes_.prefixes().size() * num_heads)) {
    rows += int64_t{merge.num_states} * merge.rows.num_rows;
  }
  return shape_.cost.longest(longest + shape_.cost.of_sharing(rows / shape_.num_ctas));
}

/// Writes the work tiles of those `items` for which `selects` is true. None of `items` is cut. The
/// next item of queue c is written to index next_whole[c] of ScheduleMemory::tiles.
template <class Selects>
void Scheduler::write_whole(std::span<const Item> items, int32_t* next_whole,
                            Selects selects) const {
  // These are local variables, because members would be read from memory again after every tile
  // that is written.
  WorkTile* const tiles = memory_.tiles;
  const Merge* const merges = memory_.merges;
  const int32_t first_merge = sharing_.first;
  const int32_t num_heads = shape_.num_kv_heads;
  for (const Item& item : items) {
    const RowTile& t = row_tiles_[item.row_tile];
    if (!selects(item, t)) continue;
    int32_t merge = -1;
    int32_t row = -1;
    if (t.sharer >= 0) {
      merge = first_merge + t.sharer * num_heads + item.head;
      row = merges[merge].first_partial_row;
    }
    tiles[next_whole[item.cta]++] = {t.segment,    t.row_tile, item.head, item.num_heads,
                                     t.keys.begin, t.keys.end, row,       merge};
  }
}

/// Writes all queues. Where a batch has prompts and decodes, every second queue has its prompts
/// first and the others have them last: decodes, which are bound by memory, then run at the same
/// time as prompts, which are bound by arithmetic.
void Scheduler::write_queues() {
  const bool mixed = !row_tiles_.groups().empty() && !row_tiles_.longest_first().empty();
  const bool has_prefixes = has_prefixes_first();
  const auto prompts_first = [mixed](int32_t cta) { return mixed && cta % 2 == 0; };
  const auto count_whole = [&](const QueueFiller& filler, int32_t* counts) {
    std::fill_n(counts, shape_.num_ctas, 0);
    for (const Item& item : filler.whole()) ++counts[item.cta];
  };
  int32_t* const next_whole = next_whole_.data();
  int32_t* const next_whole_prefix = next_whole_prefix_.data();
  count_whole(filler_, next_whole);
  if (has_prefixes) count_whole(prefix_filler_, next_whole_prefix);
  WorkTile* const tiles = memory_.tiles;
  int32_t next = 0;
  for (int32_t c = 0; c < shape_.num_ctas; ++c) {
    if (has_prefixes) {
      next = write_pieces(prefix_filler_, c, false, next_whole_prefix, next, tiles);
    }
    next = write_pieces(filler_, c, prompts_first(c), next_whole, next, tiles);
    schedule_.cta_indptr[static_cast<std::size_t>(c) + 1] = next;
  }
  std::fill(schedule_.cta_indptr.begin() + shape_.num_ctas + 1, schedule_.cta_indptr.end(), next);
  const auto all = [](const Item&, const RowTile&) { return true; };
  if (has_prefixes) write_whole(prefix_filler_.whole(), next_whole_prefix, all);
  if (mixed) {
    const auto is_early = [&](const Item& item, const RowTile& tile) {
      return tile.in_group() == prompts_first(item.cta);
    };
    const auto is_late = [&](const Item& item, const RowTile& tile) {
      return !is_early(item, tile);
    };
    write_whole(filler_.whole(), next_whole, is_early);
    write_whole(filler_.whole(), next_whole, is_late);
  } else {
    write_whole(filler_.whole(), next_whole, all);
  }
  const Cutter& cutter = filler_.cutter();
  schedule_.tiles = {tiles, static_cast<std::size_t>(next)};
  schedule_.first_merge = cutter.first_merge();
  schedule_.merges = {memory_.merges + schedule_.first_merge,
                      static_cast<std::size_t>(merges_end() - schedule_.first_merge)};
  schedule_.num_cut += cutter.num_cut();
  schedule_.num_partial_rows = cutter.num_partial_rows();
}

}  // namespace flashplan
