// SPDX-License-Identifier: Apache-2.0
// FlashInfer's Algorithm 1 with two changes (DESIGN.md, "Scheduling"): whole row tiles are dealt in
// serpentine order instead of through a priority queue, and what does not fit is cut to fill the
// queues exactly (McNaughton's wrap-around rule), which keeps the bound of 2 partial results per
// CTA.
#include "plan/schedule/queue_filler.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "plan/schedule/division.h"
#include "plan/schedule/schedule_tuning.h"

namespace flashplan {

int32_t least_heads_per_item(const ScheduleShape& shape, int64_t max_row_tiles) noexcept {
  if (shape.item_steps == 0) return shape.num_kv_heads;
  const int64_t heads = max_row_tiles * shape.num_kv_heads / kScheduleTuning.most_items;
  return static_cast<int32_t>(std::clamp<int64_t>(heads, 1, shape.num_kv_heads));
}

int32_t TileSet::num_row_tiles() const {
  auto num = static_cast<int32_t>(longest_first.size());
  for (const RowTileGroup& group : groups) num += group.count;
  return num;
}

const RowTile* TileSet::longest() const {
  const RowTile* longest = nullptr;
  const auto consider = [&](const RowTile& tile) {
    if (longest == nullptr || tile.head_cost > longest->head_cost) longest = &tile;
  };
  if (!longest_first.empty()) consider(row_tiles[longest_first.front()]);
  for (const RowTileGroup& group : groups) consider(row_tiles[group.first + group.count - 1]);
  return longest;
}

void QueueFiller::reserve(const ScheduleShape& shape, int32_t max_items, int32_t max_work_tiles,
                          int32_t max_row_tiles) {
  shape_ = shape;
  least_heads_ = least_heads_per_item(shape, max_row_tiles);
  const auto items = static_cast<std::size_t>(max_items);
  cutter_.reserve(shape, max_work_tiles);
  dealt_.resize(items);
  left_.resize(items);
  sorted_.resize(items);
  take_queues(shape.num_ctas);
}

void QueueFiller::take_queues(int32_t num_queues) {
  shape_.num_ctas = num_queues;
  cutter_.take_queues(num_queues);
  const auto count = static_cast<std::size_t>(num_queues);
  heap_.resize(count);
  loads_.resize(count);
  dealt_cost_.resize(count);
}

void QueueFiller::fill(const TileSet& tiles, const Segment* segments, const SharingMerges& sharing,
                       std::span<const int64_t> loads) {
  tiles_ = &tiles;
  loads_before_ = loads;
  cutter_.begin(segments, sharing, tiles.queues_wait);
  if (shape_.division != Division::kBalanced) {
    place_without_cuts();
    tiles_ = nullptr;
    return;
  }
  if (tiles.capacity > 0) {
    heads_at_once_ = 1;
    deal_items(tiles.capacity, tiles.capacity);
    if (place_the_rest(tiles.capacity) <= 0) {
      tiles_ = nullptr;
      return;
    }
  }
  // The share is the cost that each CTA would get from a perfect division: L_kv of Algorithm 1.
  const int64_t cost = std::accumulate(loads.begin(), loads.end(), tiles.cost);
  const int64_t share = cost / shape_.num_ctas + 1;
  if (!shape_.cuts) {
    fill_uncut(share);
    tiles_ = nullptr;
    return;
  }
  fill_queues(share, shape_.heads_at_once);
  if (shape_.heads_at_once > 1) {
    constexpr int64_t kWorth = kScheduleTuning.paired_heads_part;
    const auto longest = [this] { return *std::max_element(loads_.begin(), loads_.end()); };
    const int64_t together = longest();
    if (together > share + share / kWorth) {
      fill_queues(share, 1);
      if (longest() + longest() / kWorth >= together) {
        fill_queues(share, shape_.heads_at_once);
      }
    }
  }
  tiles_ = nullptr;
}

/// Divides the work of tiles_ among queues that get `share` each.
void QueueFiller::fill_queues(int64_t share, int32_t heads_at_once) {
  constexpr ScheduleTuning kTuning = kScheduleTuning;
  const TileSet& tiles = *tiles_;
  heads_at_once_ = heads_at_once;
  bool in_groups = !tiles.groups.empty();
  // Where queues may exceed their share, they are dealt less than their share. The heap then puts
  // each item that is left into the queue that is the shortest by then, which evens the queues out.
  const bool may_exceed = in_groups && shape_.uncut_part > 0;
  deal_items(share, share - (may_exceed ? share / shape_.uncut_part : 0));
  // The cost that cuts add is known only after the cuts are made, so several capacities are tried.
  // If the work does not fit, the slack grows by a little more than what was missing. It grows at
  // least by a part of itself, which keeps the tries few, and about doubles at most, which keeps
  // the slack small.
  const int64_t least_part =
      tiles.queues_wait ? kTuning.least_growth_part_of_waiting : kTuning.least_growth_part;
  int64_t slack = first_slack(share);
  int64_t too_little = 0;
  for (int i = 0; i < kTuning.most_tries; ++i) {
    const int64_t excess = place_the_rest(share + slack);
    if (excess <= 0) {
      if (!tiles.longest_first.empty()) reduce_slack(share, too_little, slack);
      break;
    }
    too_little = slack;
    const int64_t lacking = excess / shape_.num_ctas;
    const int64_t more = lacking * kTuning.lacking_numerator / kTuning.lacking_denominator;
    slack += std::clamp(more, slack / least_part, slack) + 1;
    if (in_groups && slack > share / kTuning.groups_part) {
      // There are too few items after the groups to balance the queues: drop the groups, and let
      // the heap place all items, longest first. Nothing fits a capacity of 0, so nothing is dealt.
      in_groups = false;
      deal_items(share, 0);
      slack = first_slack(share);
    }
  }
}

/// Divides the items of tiles_ among queues that get `share` each, and cuts none. Items that were
/// not dealt go as a whole, longest first, to the least loaded queue. The fewer items are dealt,
/// the more even the queues are, but the fewer CTAs read the same keys at the same time. So ever
/// fewer items are dealt until the longest queue is about as long as its share. Of these tries the
/// last one that made the longest queue much shorter is used.
void QueueFiller::fill_uncut(int64_t share) {
  constexpr ScheduleTuning kTuning = kScheduleTuning;
  const auto fill = [&](int64_t part) {
    deal_items(share, share - share / part);
    place_the_rest(std::numeric_limits<int64_t>::max());
    return *std::max_element(loads_.begin(), loads_.end());
  };
  const int64_t hardly = share / kTuning.uncut_slack_part;
  heads_at_once_ = 1;
  int64_t best_part = kTuning.least_undealt_part;
  int64_t shortest = fill(best_part);
  int64_t part = best_part;
  while (shortest > share + hardly && part > 1) {
    part /= 2;
    const int64_t longest = fill(part);
    if (longest + hardly >= shortest) continue;
    shortest = longest;
    best_part = part;
  }
  if (best_part != part) fill(best_part);
}

/// Makes the longest queue shorter, by trying smaller slacks than `enough`, with which the last try
/// succeeded. Slacks up to `too_little` have failed (0: none has). This matters where queues have
/// few steps: a request of 16 steps is then cut into pieces of 8 and 8 steps instead of 9 and 7. If
/// a batch has prompts and decodes, the slack of the first try is large, so more slacks are tried,
/// as long as they can shorten the longest queue by more than the cost of cutting a full row tile.
void QueueFiller::reduce_slack(int64_t share, int64_t too_little, int64_t enough) {
  constexpr ScheduleTuning kTuning = kScheduleTuning;
  const bool has_prompts = !tiles_->groups.empty();
  const int tries = has_prompts ? kTuning.reductions_with_prompts : kTuning.reductions;
  int64_t wanted = share / kTuning.reduction_part;
  int64_t longest = *std::max_element(loads_.begin(), loads_.end()) - share;
  if (longest - too_little <= wanted) return;
  if (has_prompts) {
    wanted = std::max(share / kTuning.reduction_part_with_prompts,
                      shape_.cost.of_tile(shape_.tile_q) + shape_.cost.of_split(shape_.tile_q));
  }
  int64_t last = enough;
  for (int i = 0; i < tries && longest - too_little > wanted; ++i) {
    last = (too_little + longest) / 2;
    if (place_the_rest(share + last) > 0) {
      too_little = last;
    } else {
      enough = last;
      longest = *std::max_element(loads_.begin(), loads_.end()) - share;
    }
  }
  if (last != enough) place_the_rest(share + enough);
}

/// Gives items to the CTAs in serpentine order. Items that do not fit go to left_.
class QueueFiller::Dealer {
 public:
  Dealer(QueueFiller& filler, int64_t capacity)
      : filler_(filler),
        loads_(filler.loads_.data()),
        last_cta_(filler.shape_.num_ctas - 1),
        turn_(last_cta_),
        capacity_(capacity),
        dealt_(filler.dealt_.data()),
        left_(filler.left_.data()) {}

  /// Deals heads [head, head + num_heads) of a row tile, which cost `head_cost` each.
  void deal(int32_t row_tile, int32_t head, int32_t num_heads, int64_t head_cost) {
    const int32_t cta = place_ + shift_ - (place_ + shift_ > last_cta_ ? last_cta_ + 1 : 0);
    const int64_t load = loads_[cta] + head_cost * num_heads;
    if (load <= capacity_) {
      loads_[cta] = load;
      *dealt_++ = {row_tile, head, num_heads, cta};
    } else {
      *left_++ = {row_tile, head, num_heads, -1};
    }
    // The direction changes at both ends, so that queues that got the lighter items of a round get
    // the heavier items of the next round.
    if (place_ == turn_) {
      if (moves_on_ && place_ == 0 && ++shift_ > last_cta_) shift_ = 0;
      turn_ = last_cta_ - turn_;
      direction_ = -direction_;
    } else {
      place_ += direction_;
    }
  }

  /// Begins to deal a group of `count` row tiles. If the group has few row tiles, every second
  /// round begins one queue later. Without this, if twice the number of queues is a multiple of
  /// `count`, each queue would get tiles of the same two lengths again and again: for example, one
  /// queue tiles of one and four steps, another one tiles of two and three steps. Their sums are
  /// equal in the model, but the model's errors for each length would add up.
  void begin_group(int32_t count) { moves_on_ = count <= kScheduleTuning.few_row_tiles; }

  int32_t num_dealt() const { return static_cast<int32_t>(dealt_ - filler_.dealt_.data()); }
  int32_t num_left() const { return static_cast<int32_t>(left_ - filler_.left_.data()); }

 private:
  QueueFiller& filler_;
  int64_t* const loads_;
  const int32_t last_cta_;
  int32_t turn_;  // the place at which the direction changes: the last or the first one
  const int64_t capacity_;
  Item* dealt_;
  Item* left_;
  int32_t place_ = 0;
  int32_t shift_ = 0;  // the CTA at place 0
  bool moves_on_ = false;
  int32_t direction_ = 1;
};

/// Makes items for CTAs that get `share` each, and deals those that fit into queues of `capacity`.
void QueueFiller::deal_items(int64_t share, int64_t capacity) {
  if (loads_before_.empty()) {
    std::fill(loads_.begin(), loads_.end(), 0);
  } else {
    std::copy(loads_before_.begin(), loads_before_.end(), loads_.begin());
  }
  Dealer dealer(*this, capacity);
  const RowTiles& row_tiles = tiles_->row_tiles;
  const int32_t num_heads = shape_.num_kv_heads;
  for (const RowTileGroup& group : tiles_->groups) {
    // The row tile in the middle costs about the average.
    const int32_t at_once = heads_per_item(row_tiles[group.first + group.count / 2], share);
    dealer.begin_group(group.count);
    for (int32_t head = 0; head < num_heads; head += at_once) {
      // The last row tile is dealt first: with a causal mask it is the longest.
      for (int32_t i = group.first + group.count - 1; i >= group.first; --i) {
        dealer.deal(i, head, std::min(at_once, num_heads - head), row_tiles[i].head_cost);
      }
    }
  }
  const int32_t of_sharer = heads_per_sharer();
  for (const int32_t i : tiles_->longest_first) {
    const RowTile& tile = row_tiles[i];
    const int32_t of_request = shape_.cuts ? num_heads : heads_per_item(tile, share);
    const int32_t at_once = tile.sharer < 0 ? of_request : of_sharer;
    for (int32_t head = 0; head < num_heads; head += at_once) {
      dealer.deal(i, head, std::min(at_once, num_heads - head), tile.head_cost);
    }
  }
  num_dealt_ = dealer.num_dealt();
  num_left_ = dealer.num_left();
  if (has_heap()) sort_left_items();
  std::copy(loads_.begin(), loads_.end(), dealt_cost_.begin());
}

int64_t QueueFiller::cost_of(const Item& item) const {
  return tiles_->row_tiles[item.row_tile].head_cost * item.num_heads;
}

void QueueFiller::sort_left_items() {
  classes_.clear();
  const std::span left(left_.data(), static_cast<std::size_t>(num_left_));
  for (const Item& item : left) classes_.add(CostClasses::of(cost_of(item)));
  classes_.start();
  for (const Item& item : left) {
    sorted_[static_cast<std::size_t>(classes_.place(CostClasses::of(cost_of(item))))] = item;
  }
  num_sorted_ = num_left_;
}

/// Gives sorted items from number `first` on to the least loaded CTAs. Items that do not fit are
/// left to be cut. The longest items are placed first, so that those left are short: they have
/// fewer rows, so cutting them costs less.
void QueueFiller::place_whole(int32_t first, int64_t capacity) {
  int64_t* loads = loads_.data();
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
    Item item = sorted_[static_cast<std::size_t>(n)];
    const int64_t cost = cost_of(item);
    int64_t& load = loads[heap_[0]];
    if (load + cost > capacity) {
      left_[static_cast<std::size_t>(num_left_++)] = item;
      continue;
    }
    load += cost;
    item.cta = heap_[0];
    dealt_[static_cast<std::size_t>(num_whole_++)] = item;
    sift_down(0);
  }
}

/// The slack of the first try: how much more than its share a queue may get, because cuts add work.
int64_t QueueFiller::first_slack(int64_t share) const {
  int32_t rows = 0;
  for (int32_t n = 0; n < num_left_; ++n) {
    const int32_t i = left_[static_cast<std::size_t>(n)].row_tile;
    rows = std::max<int32_t>(rows, tiles_->row_tiles[i].num_rows);
  }
  const int64_t tile = shape_.cost.of_tile(rows);
  if (tiles_->queues_wait) {
    const int64_t step = shape_.cost.of_step(rows);
    // Uncut tiles of prefixes write a partial result, too, so their cost contains its cost.
    const bool writes_uncut = tiles_->num_sharers > 0;
    const int64_t fixed =
        tile + (writes_uncut ? shape_.cost.of_write(rows) : shape_.cost.of_split(rows));
    if (num_dealt_ > 0) return fixed + step;  // the most that one cut may add
    // No tile fits into a queue, so each queue gets one piece, of the same number of steps.
    const int64_t num_tiles = int64_t{tiles_->num_row_tiles()} * shape_.num_kv_heads;
    const int64_t of_tiles = num_tiles * (writes_uncut ? fixed : tile);
    const int64_t steps = std::max<int64_t>(tiles_->cost - of_tiles, 0) / step;
    const int64_t steps_of_queue = steps / shape_.num_ctas + (steps % shape_.num_ctas != 0 ? 1 : 0);
    return std::max(fixed + steps_of_queue * step - share,
                    (fixed + step) / kScheduleTuning.least_cut_part);
  }
  const int64_t granule = shape_.granule() * shape_.cost.of_step(rows);
  const int64_t split = shape_.cost.of_split(rows);
  // The most that one cut may add to a queue: the fixed cost of one more tile, the cost of a split,
  // and room that stays empty because it is less than a granule. Most cuts add less.
  constexpr ScheduleTuning kTuning = kScheduleTuning;
  const int64_t cut = tile + granule + split;
  const int64_t least_of_cuts = cut / kTuning.least_cut_part;
  const int64_t most_of_cuts = kTuning.cuts_of_queue * cut;
  const int64_t least = std::clamp(share / kTuning.slack_part, least_of_cuts, most_of_cuts) + 1;
  if (!tiles_->groups.empty()) {
    return shape_.uncut_part > 0 ? std::max(least, share / shape_.uncut_part) : least;
  }
  // Without groups most queues will have a cut at both ends, which add one more tile, half a
  // granule on average and two splits. To save a second try, up to twice share / slack_part is
  // allowed.
  const int64_t of_both_ends = tile + granule / 2 + 2 * split;
  return std::max(least, std::min(of_both_ends, 2 * share / kTuning.slack_part));
}

/// How many heads of `tile` an item has: so many that it has about item_steps steps, but takes at
/// most a part of a queue's share.
int32_t QueueFiller::heads_per_item(const RowTile& tile, int64_t share) const {
  const int64_t of_step = shape_.cost.of_step(shape_.tile_q);
  const int64_t wanted =
      std::min(shape_.item_steps * of_step, share / kScheduleTuning.items_per_queue) /
      std::max<int64_t>(tile.head_cost, 1);
  return static_cast<int32_t>(std::clamp<int64_t>(wanted, least_heads_, shape_.num_kv_heads));
}

/// How many heads an item of a sharer has. Where queues wait for the longest one, items have as few
/// heads as possible. Otherwise they have so many that there is about one item for each queue: the
/// CTA that finishes the last piece of a head merges the pieces' states, and this work should be
/// divided among the CTAs, too.
int32_t QueueFiller::heads_per_sharer() const {
  if (shape_.item_steps == 0 || tiles_->num_sharers == 0) return shape_.num_kv_heads;
  if (tiles_->queues_wait) return least_heads_;
  const int32_t heads = ceil_divide(tiles_->num_sharers * shape_.num_kv_heads, shape_.num_ctas);
  return std::clamp(heads, least_heads_, shape_.num_kv_heads);
}

/// Places the items that were not dealt. The last queue takes all that does not fit elsewhere.
/// Returns by how much the last queue's cost exceeds `capacity`.
int64_t QueueFiller::place_the_rest(int64_t capacity) {
  std::copy(dealt_cost_.begin(), dealt_cost_.end(), loads_.begin());
  num_whole_ = num_dealt_;
  cutter_.start(capacity, loads_.data(), heads_at_once_);
  if (has_heap()) {
    // Items that no queue can hold are cut first, while queues still have room for their pieces.
    int32_t first = 0;
    while (first < num_sorted_ && cost_of(sorted_[static_cast<std::size_t>(first)]) > capacity)
      ++first;
    cutter_.lay(tiles_->row_tiles, {sorted_.data(), static_cast<std::size_t>(first)});
    place_whole(first, capacity);
  }
  cutter_.lay(tiles_->row_tiles, {left_.data(), static_cast<std::size_t>(num_left_)});
  cutter_.finish();
  return loads_.back() - capacity;
}

}  // namespace flashplan
