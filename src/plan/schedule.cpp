// SPDX-License-Identifier: Apache-2.0
// FlashInfer's Algorithm 1 with two changes (DESIGN.md, "Scheduling"): whole row tiles are dealt in
// serpentine order instead of through a priority queue, and what does not fit is cut to fill the
// queues exactly (McNaughton's wrap-around rule), which keeps the bound of 2 partial results per
// CTA.
#include "plan/schedule.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <utility>

namespace flashplan {
namespace {

/// Limits the items of the largest batch, and with them what is copied to the device.
int32_t least_heads_per_item(const ScheduleShape& shape, int64_t max_row_tiles) {
  constexpr int64_t kMostItems = 1 << 14;
  if (shape.item_steps == 0) return shape.num_kv_heads;
  const int64_t heads = max_row_tiles * shape.num_kv_heads / kMostItems;
  return static_cast<int32_t>(std::clamp<int64_t>(heads, 1, shape.num_kv_heads));
}

/// Takes the pieces that are parts of splits, the first and the last one, and writes them to `to`.
WorkTile* take_splits(std::span<const WorkTile>* pieces, WorkTile* to) {
  if (!pieces->empty() && pieces->front().merge >= 0) {
    *to++ = pieces->front();
    *pieces = pieces->subspan(1);
  }
  if (!pieces->empty() && pieces->back().merge >= 0) {
    *to++ = pieces->back();
    *pieces = pieces->first(pieces->size() - 1);
  }
  return to;
}

/// Writes the merge of each head, given that of head 0, and returns where the next go. In parts of
/// 16 bytes: there are thousands.
Merge* write_heads(const Merge& of_head_0, int32_t num_heads, Merge* to) {
  using Ints = int32_t __attribute__((vector_size(16)));
  struct Parts {
    Ints rows;
    Ints states;  // kv_head, first_partial_row, ...
    Ints links;   // parent, first_reader, ...
  };
  auto parts = std::bit_cast<Parts>(of_head_0);
  const Ints next_states = {1, of_head_0.rows.num_rows, 0, 0};
  const Ints next_links = {of_head_0.parent >= 0, of_head_0.first_reader >= 0, 0, 0};
  for (int32_t head = 0; head < num_heads; ++head) {
    *to++ = std::bit_cast<Merge>(parts);
    parts.states += next_states;
    parts.links += next_links;
  }
  return to;
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
  // Sharers may be dealt in so many more items (heads_per_sharer).
  const int32_t items = tiles * ((shape.num_kv_heads + least_heads - 1) / least_heads) +
                        (shape.shares_prefixes ? 2 * shape.num_ctas : 0);
  // A cut is made at most once per CTA and adds at most two work tiles (the rest of a head, the
  // heads after it) and one split.
  return {.requests = max_batch_size,
          .segments = max_batch_size + prefixes,
          .row_tiles = tiles,
          .items = items,
          .work_tiles = items + 3 * shape.num_ctas,
          .merges = shape.num_ctas + sharers * shape.num_kv_heads};
}

void Scheduler::reserve(const ScheduleShape& shape, const ScheduleBounds& bounds) {
  shape_ = shape;
  const int32_t prefixes = bounds.segments - bounds.requests;
  least_heads_ = least_heads_per_item(shape, bounds.row_tiles - prefixes);
  const auto num_ctas = static_cast<std::size_t>(shape.num_ctas);
  const auto items = static_cast<std::size_t>(bounds.items);
  schedule_ = Schedule();
  schedule_.cta_indptr.assign(num_ctas + 1, 0);
  schedule_.cta_cost.assign(num_ctas, 0);
  max_merges_ = bounds.merges;
  prefixes_.reserve(shape, bounds.requests);
  row_tiles_.reserve(shape, bounds.segments, bounds.row_tiles);
  cutter_.reserve(shape, bounds.work_tiles);
  dealt_.resize(items);
  left_.resize(items);
  sorted_.resize(items);
  heap_.resize(num_ctas);
  next_whole_.resize(num_ctas);
  dealt_cost_.assign(num_ctas, 0);
}

void Scheduler::make(const Batch& batch, std::span<const PrefixGroup> groups,
                     const ScheduleMemory& memory) {
  memory_ = memory;
  prefixes_.build(batch, groups);
  schedule_batch(batch);
  if (prefixes_.empty()) return;
  // Less work in larger tiles may still take longer, where they can not be divided among all CTAs.
  const int64_t with = longest_queue();
  if (with <= (schedule_.total_cost + schedule_.saved_cost) / shape_.num_ctas) return;
  prefixes_.clear();
  schedule_batch(batch);
  if (longest_queue() <= with) return;
  prefixes_.build(batch, groups);
  schedule_batch(batch);
}

void Scheduler::schedule_batch(const Batch& batch) {
  row_tiles_.collect(batch, prefixes_, memory_.segments);
  schedule_.prefixes = prefixes_.prefixes();
  schedule_.segments = {memory_.segments,
                        static_cast<std::size_t>(batch.batch_size) + schedule_.prefixes.size()};
  schedule_.total_cost = row_tiles_.total_cost();
  schedule_.saved_cost = prefixes_.saved_cost();
  write_sharing_merges(batch);
  cutter_.begin(memory_.segments, sharing_);
  // The paper's L_kv, as a cost: what each CTA would get of a perfect division.
  const int64_t share = schedule_.total_cost / shape_.num_ctas + 1;
  deal_items(share, share);
  fill_queues(share);
  write_queues();
}

int64_t Scheduler::longest_queue() const {
  return *std::max_element(schedule_.cta_cost.begin(), schedule_.cta_cost.end());
}

/// The merges of sharers, none of which is cut so far: each has one state of each head.
void Scheduler::write_sharing_merges(const Batch& batch) {
  const int32_t num_heads = shape_.num_kv_heads;
  sharing_ = {memory_.merges, max_merges_ - prefixes_.num_sharers() * num_heads,
              prefixes_.num_partial_rows()};
  if (prefixes_.empty()) return;
  const std::span<const SharedPrefix> prefixes = prefixes_.prefixes();
  const auto merge_of = [&](int32_t sharer) { return sharing_.first + sharer * num_heads; };
  const auto merge_of_prefix = [&](int32_t prefix) {
    return prefix < 0 ? -1 : merge_of(prefixes_.num_requests() + prefix);
  };
  Merge* next = memory_.merges + sharing_.first;
  Merge merge = {.rows = {},
                 .kv_head = 0,
                 .first_partial_row = 0,
                 .num_states = 1,
                 .num_pieces = 0,
                 .parent = -1,
                 .first_reader = -1,
                 .num_readers = 0,
                 .reader_step = num_heads};
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    if (prefixes_.sharer_of(r) < 0) continue;
    const int32_t prefix = prefixes_.prefix_of(r);
    const Segment& segment = memory_.segments[r];
    merge.rows = {r, segment.qo_begin, 0, segment.qo_len * shape_.group_size};
    // It waits for its own work tile and for each prefix.
    merge.num_pieces = prefixes[static_cast<size_t>(prefix)].depth + 2;
    merge.parent = merge_of_prefix(prefix);
    next = write_heads(merge, num_heads, next);
    merge.first_partial_row += merge.rows.num_rows * num_heads;
  }
  int32_t number = batch.batch_size;
  merge.num_pieces = 1;
  for (const SharedPrefix& prefix : prefixes) {
    merge.rows = {number++, batch.qo_indptr[prefix.first_request], 0, prefix.num_rows};
    merge.parent = merge_of_prefix(prefix.parent);
    merge.first_reader = merge_of(prefix.first_reader);
    merge.num_readers = prefix.num_readers;
    next = write_heads(merge, num_heads, next);
    merge.first_partial_row += merge.rows.num_rows * num_heads;
  }
}

/// Gives items to the CTAs in serpentine order, where they fit.
class Scheduler::Dealer {
 public:
  Dealer(Scheduler& scheduler, int64_t capacity)
      : scheduler_(scheduler),
        loads_(scheduler.schedule_.cta_cost.data()),
        num_ctas_(scheduler.shape_.num_ctas),
        capacity_(capacity),
        dealt_(scheduler.dealt_.data()),
        left_(scheduler.left_.data()) {}

  void deal(int32_t row_tile, int32_t head, int32_t num_heads) {
    const int64_t cost = scheduler_.row_tiles_[row_tile].head_cost * num_heads;
    int64_t& load = loads_[cta_];
    if (load + cost <= capacity_) {
      load += cost;
      *dealt_++ = {row_tile, head, num_heads, cta_};
    } else {
      *left_++ = {row_tile, head, num_heads, -1};
    }
    // Turning round at both ends gives the lighter queues of a round the heavier of the next.
    if (cta_ + direction_ < 0 || cta_ + direction_ == num_ctas_) {
      direction_ = -direction_;
    } else {
      cta_ += direction_;
    }
  }

  int32_t num_dealt() const { return static_cast<int32_t>(dealt_ - scheduler_.dealt_.data()); }
  int32_t num_left() const { return static_cast<int32_t>(left_ - scheduler_.left_.data()); }

 private:
  Scheduler& scheduler_;
  int64_t* const loads_;
  const int32_t num_ctas_;
  const int64_t capacity_;
  Item* dealt_;
  Item* left_;
  int32_t cta_ = 0;
  int32_t direction_ = 1;
};

/// Makes items for CTAs that get `share` each, and deals those that fit into queues of `capacity`.
void Scheduler::deal_items(int64_t share, int64_t capacity) {
  std::fill(schedule_.cta_cost.begin(), schedule_.cta_cost.end(), 0);
  Dealer dealer(*this, capacity);
  const int32_t num_heads = shape_.num_kv_heads;
  for (const RowTileGroup& group : row_tiles_.groups()) {
    const int32_t at_once = heads_per_item(group, share);
    for (int32_t head = 0; head < num_heads; head += at_once) {
      // From the end: with a causal mask the last row tile is the longest.
      for (int32_t i = group.first + group.count - 1; i >= group.first; --i) {
        dealer.deal(i, head, std::min(at_once, num_heads - head));
      }
    }
  }
  const int32_t of_sharer = heads_per_sharer();
  for (const int32_t i : row_tiles_.longest_first()) {
    const int32_t at_once = row_tiles_[i].sharer < 0 ? num_heads : of_sharer;
    for (int32_t head = 0; head < num_heads; head += at_once) {
      dealer.deal(i, head, std::min(at_once, num_heads - head));
    }
  }
  num_dealt_ = dealer.num_dealt();
  num_left_ = dealer.num_left();
  if (!row_tiles_.groups().empty()) sort_left_items();
  std::copy(schedule_.cta_cost.begin(), schedule_.cta_cost.end(), dealt_cost_.begin());
}

int64_t Scheduler::cost_of(const Item& item) const {
  return row_tiles_[item.row_tile].head_cost * item.num_heads;
}

void Scheduler::sort_left_items() {
  classes_.clear();
  const std::span left(left_.data(), static_cast<size_t>(num_left_));
  for (const Item& item : left) classes_.add(CostClasses::of(cost_of(item)));
  classes_.start();
  for (const Item& item : left) {
    sorted_[static_cast<size_t>(classes_.place(CostClasses::of(cost_of(item))))] = item;
  }
  num_sorted_ = num_left_;
}

/// Longest first to the least loaded CTA: what is split instead costs more the more rows it has.
void Scheduler::place_whole(int32_t first, int64_t capacity) {
  int64_t* loads = schedule_.cta_cost.data();
  const auto is_lighter = [&](int32_t a, int32_t b) {
    return loads[a] != loads[b] ? loads[a] < loads[b] : a < b;
  };
  const auto size = heap_.size();
  const auto sift_down = [&](size_t i) {
    for (size_t child = 2 * i + 1; child < size; child = 2 * i + 1) {
      if (child + 1 < size && is_lighter(heap_[child + 1], heap_[child])) ++child;
      if (!is_lighter(heap_[child], heap_[i])) return;
      std::swap(heap_[child], heap_[i]);
      i = child;
    }
  };
  for (size_t c = 0; c < size; ++c) heap_[c] = static_cast<int32_t>(c);
  for (size_t i = size / 2; i-- > 0;) sift_down(i);

  num_left_ = 0;
  for (int32_t n = first; n < num_sorted_; ++n) {
    Item item = sorted_[static_cast<size_t>(n)];
    const int64_t cost = cost_of(item);
    int64_t& load = loads[heap_[0]];
    if (load + cost > capacity) {
      left_[static_cast<size_t>(num_left_++)] = item;
      continue;
    }
    load += cost;
    item.cta = heap_[0];
    dealt_[static_cast<size_t>(num_whole_++)] = item;
    sift_down(0);
  }
}

/// The initial slack of a queue beyond its share, for the overhead of cuts.
int64_t Scheduler::least_extra(int64_t share) const {
  int32_t rows = 0;
  for (int32_t n = 0; n < num_left_; ++n) {
    const int32_t i = left_[static_cast<size_t>(n)].row_tile;
    rows = std::max<int32_t>(rows, row_tiles_[i].num_rows);
  }
  const int64_t tile = shape_.cost.of_tile(rows);
  const int64_t granule = shape_.granule() * shape_.cost.of_step(rows);
  const int64_t split = shape_.cost.of_split(rows);
  // What one cut may add: the fixed cost of one more tile, a granule that is left, or a cut that is
  // not worth it.
  const int64_t cut = tile + granule + split;
  constexpr int64_t kUnnoticed = 64;  // such a part of a queue is not worth another try
  const int64_t least = std::clamp(share / kUnnoticed, cut / 4, 2 * cut) + 1;
  if (!row_tiles_.groups().empty()) {
    return shape_.uncut_part > 0 ? std::max(least, share / shape_.uncut_part) : least;
  }
  // Without groups most queues will have a cut at both ends: twice as much, to save a second try.
  return std::max(least, std::min(tile + granule / 2 + 2 * split, 2 * share / kUnnoticed));
}

/// Heads per item: enough for about item_steps steps, at most a quarter of a CTA's share.
int32_t Scheduler::heads_per_item(const RowTileGroup& group, int64_t share) const {
  constexpr int64_t kItemsPerCta = 4;
  // The row tile in the middle costs about the average.
  const RowTile& tile = row_tiles_[group.first + group.count / 2];
  const int64_t of_step = shape_.cost.of_step(shape_.tile_q);
  const int64_t wanted = std::min(shape_.item_steps * of_step, share / kItemsPerCta) /
                         std::max<int64_t>(tile.head_cost, 1);
  return static_cast<int32_t>(std::clamp<int64_t>(wanted, least_heads_, shape_.num_kv_heads));
}

/// Heads per item of a sharer. Whoever finishes the last piece of a row merges it, so that merging
/// is divided among the CTAs if each has pieces that begin late, the short ones.
int32_t Scheduler::heads_per_sharer() const {
  if (shape_.item_steps == 0 || prefixes_.empty()) return shape_.num_kv_heads;
  const int64_t heads = int64_t{prefixes_.num_sharers()} * shape_.num_kv_heads / shape_.num_ctas;
  return static_cast<int32_t>(std::clamp<int64_t>(heads, least_heads_, shape_.num_kv_heads));
}

/// Places what is left. Returns by how much the last queue, which takes the rest, is longer than
/// `capacity`.
int64_t Scheduler::place_the_rest(int64_t capacity) {
  std::copy(dealt_cost_.begin(), dealt_cost_.end(), schedule_.cta_cost.begin());
  num_whole_ = num_dealt_;
  cutter_.start(capacity, schedule_.cta_cost.data());
  if (!row_tiles_.groups().empty()) {
    // What no queue can hold is cut while there is room.
    int32_t first = 0;
    while (first < num_sorted_ && cost_of(sorted_[static_cast<size_t>(first)]) > capacity) ++first;
    cutter_.lay(row_tiles_, {sorted_.data(), static_cast<size_t>(first)});
    place_whole(first, capacity);
  }
  cutter_.lay(row_tiles_, {left_.data(), static_cast<size_t>(num_left_)});
  cutter_.finish();
  return schedule_.cta_cost.back() - capacity;
}

void Scheduler::fill_queues(int64_t share) {
  constexpr int kTries = 16;
  // Groups let CTAs share keys in the L2 cache, which is worth an imbalance of up to 1/8.
  constexpr int64_t kWorthOfGroups = 8;
  // What cuts add is known afterwards: capacities are tried, each larger by what the last lacked.
  int64_t extra = least_extra(share);
  bool in_groups = !row_tiles_.groups().empty();
  for (int i = 0; i < kTries; ++i) {
    const int64_t excess = place_the_rest(share + extra);
    if (excess <= 0) return;
    extra += std::clamp(excess / shape_.num_ctas * 5 / 4, extra / 2, extra) + 1;
    if (in_groups && extra > share / kWorthOfGroups) {
      // There are too few items after the groups to balance the queues: drop the groups, and let
      // the heap place all items, longest first. Nothing fits a capacity of 0, so nothing is dealt.
      in_groups = false;
      deal_items(share, 0);
      extra = least_extra(share);
    }
  }
}

/// Parts of splits come first: their merges then overlap with what is whole. Where a batch has
/// prompts and decodes, every other queue has its prompts first, the others have them last:
/// decodes, which are bound by memory, run beside prompts, which are not.
void Scheduler::write_queues() {
  const std::span dealt(dealt_.data(), static_cast<size_t>(num_whole_));
  const bool mixed = !row_tiles_.groups().empty() && !row_tiles_.longest_first().empty();
  const auto prompts_first = [mixed](int32_t cta) { return mixed && cta % 2 == 0; };
  int32_t* const next_whole = next_whole_.data();  // at first the number of whole tiles
  std::fill_n(next_whole, shape_.num_ctas, 0);
  for (const Item& item : dealt) ++next_whole[item.cta];
  WorkTile* const tiles = memory_.tiles;
  WorkTile* next = tiles;
  for (int32_t c = 0; c < shape_.num_ctas; ++c) {
    std::span<const WorkTile> pieces = cutter_.pieces_of(c);
    next = take_splits(&pieces, next);
    const auto num_pieces = static_cast<int32_t>(pieces.size());
    const auto begin = static_cast<int32_t>(next - tiles);
    const int32_t count = next_whole[c];
    next += prompts_first(c) ? count : 0;
    for (const WorkTile& piece : pieces) *next++ = piece;  // a few: a call would cost more
    next += prompts_first(c) ? 0 : count;
    next_whole[c] = prompts_first(c) ? begin : begin + num_pieces;
    schedule_.cta_indptr[static_cast<size_t>(c) + 1] = static_cast<int32_t>(next - tiles);
  }
  for (int pass = 0; pass < (mixed ? 2 : 1); ++pass) {
    for (const Item& item : dealt) {
      const RowTile& t = row_tiles_[item.row_tile];
      if (mixed && (t.in_group() == prompts_first(item.cta)) == (pass == 1)) continue;
      const int32_t merge =
          t.sharer < 0 ? -1 : sharing_.first + t.sharer * shape_.num_kv_heads + item.head;
      const int32_t row = merge < 0 ? -1 : memory_.merges[merge].first_partial_row;
      tiles[next_whole[item.cta]++] = {t.segment,    t.row_tile, item.head, item.num_heads,
                                       t.keys.begin, t.keys.end, row,       merge};
    }
  }
  schedule_.tiles = {tiles, next};
  schedule_.first_merge = cutter_.first_merge();
  schedule_.merges = {memory_.merges + schedule_.first_merge,
                      static_cast<size_t>(max_merges_ - schedule_.first_merge)};
  schedule_.num_cut = cutter_.num_cut();
  schedule_.num_partial_rows = cutter_.num_partial_rows();
}

}  // namespace flashplan
