// SPDX-License-Identifier: Apache-2.0
// FlashInfer's Algorithm 1 with two changes (DESIGN.md, "Scheduling"): whole row tiles are dealt in
// serpentine order instead of through a priority queue, and what does not fit is cut to fill the
// queues exactly (McNaughton's wrap-around rule), which keeps the bound of 2 partial results per
// CTA.
#include "plan/schedule.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <span>
#include <utility>

namespace flashplan {
namespace {

int32_t ceil_shift(int64_t value, int shift) {
  return static_cast<int32_t>((value + (int64_t{1} << shift) - 1) >> shift);
}

int log2_of(int32_t power_of_two) { return std::countr_zero(static_cast<uint32_t>(power_of_two)); }

int64_t step_cost(const CostModel& cost, int32_t rows) {
  return cost.step + int64_t{cost.step_row} * rows;
}

int64_t tile_cost(const CostModel& cost, int32_t rows) {
  return cost.tile + int64_t{cost.tile_row} * rows;
}

int64_t split_cost(const CostModel& cost, int32_t rows) {
  return cost.split + int64_t{cost.split_row} * rows;
}

uint16_t cost_class_of(int64_t cost) {
  // The position of the leading bit and the three bits after it: a logarithm, piecewise linear.
  const uint64_t at_least_8 = static_cast<uint64_t>(cost) + Scheduler::kClassesPerOctave;
  const auto exponent = static_cast<uint32_t>(std::bit_width(at_least_8)) - 4;
  const auto log_scale =
      static_cast<uint32_t>(at_least_8 >> exponent) + exponent * Scheduler::kClassesPerOctave;
  return static_cast<uint16_t>(
      Scheduler::kCostClasses - 1 -
      std::min(log_scale - Scheduler::kClassesPerOctave, Scheduler::kCostClasses - 1));
}

int64_t round_down(int64_t value, int shift) { return value >> shift << shift; }

/// Limits the items of the largest batch, and with them what is copied to the device.
int32_t least_heads_per_item(const ScheduleShape& shape, int64_t max_row_tiles) {
  constexpr int64_t kMostItems = 1 << 14;
  if (shape.item_steps == 0) return shape.num_kv_heads;
  const int64_t heads = max_row_tiles * shape.num_kv_heads / kMostItems;
  return static_cast<int32_t>(std::clamp<int64_t>(heads, 1, shape.num_kv_heads));
}

KeyRange key_range(int64_t begin, int64_t end) {
  if (begin >= end) return {0, 0};
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

}  // namespace

ScheduleBounds schedule_bounds(const ScheduleShape& shape, int32_t max_batch_size,
                               int32_t max_qo_tokens) {
  const int64_t max_rows = int64_t{max_qo_tokens} * shape.group_size;
  const auto row_tiles = static_cast<int32_t>(max_batch_size + max_rows / shape.tile_q);
  const int32_t least_heads = least_heads_per_item(shape, row_tiles);
  const int32_t items = row_tiles * ((shape.num_kv_heads + least_heads - 1) / least_heads);
  // A cut is made at most once per CTA and adds at most two work tiles (the rest of a head, the
  // heads after it) and one split.
  return {row_tiles, items, items + 3 * shape.num_ctas, shape.num_ctas};
}

void Scheduler::reserve(const ScheduleShape& shape, int32_t max_batch_size, int32_t max_qo_tokens) {
  shape_ = shape;
  q_shift_ = log2_of(shape.tile_q);
  kv_shift_ = log2_of(shape.tile_kv);
  queries_per_tile_ = shape.tile_q / shape.group_size;
  heads_per_tile_ = shape.tile_q % shape.group_size;
  full_tile_cost_ = tile_cost(shape.cost, shape.tile_q);
  full_step_cost_ = step_cost(shape.cost, shape.tile_q);
  const ScheduleBounds bounds = schedule_bounds(shape, max_batch_size, max_qo_tokens);
  schedule_ = Schedule();
  schedule_.requests.reserve(static_cast<size_t>(max_batch_size));
  schedule_.cta_indptr.assign(static_cast<size_t>(shape.num_ctas) + 1, 0);
  schedule_.cta_cost.assign(static_cast<size_t>(shape.num_ctas), 0);
  dealt_cost_.assign(static_cast<size_t>(shape.num_ctas), 0);
  schedule_.tiles.reserve(static_cast<size_t>(bounds.work_tiles));
  schedule_.splits.reserve(static_cast<size_t>(bounds.splits));
  row_tiles_.resize(static_cast<size_t>(bounds.row_tiles));
  groups_.resize(static_cast<size_t>(max_batch_size));
  order_.resize(static_cast<size_t>(bounds.row_tiles));
  dealt_.resize(static_cast<size_t>(bounds.items));
  left_.resize(static_cast<size_t>(bounds.items));
  sorted_.resize(static_cast<size_t>(bounds.items));
  heap_.resize(static_cast<size_t>(shape.num_ctas));
  pieces_.resize(static_cast<size_t>(bounds.work_tiles));
  least_heads_ = least_heads_per_item(shape, bounds.row_tiles);
}

void Scheduler::make(const Batch& batch) {
  collect_row_tiles(batch);
  order_longest_first();
  // The paper's L_kv, as a cost: what each CTA would get of a perfect division.
  const int64_t share = schedule_.total_cost / shape_.num_ctas + 1;
  deal_items(share, share);
  fill_queues(share);
  write_queues();
}

void Scheduler::collect_row_tiles(const Batch& batch) {
  schedule_.requests.resize(static_cast<size_t>(batch.batch_size));
  RequestInfo* requests = schedule_.requests.data();
  next_row_tile_ = row_tiles_.data();
  class_sizes_.fill(0);
  num_groups_ = 0;
  schedule_.total_cost = 0;
  int64_t kv_cumulated = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    const int32_t qo_begin = batch.qo_indptr[r];
    const int32_t qo_len = batch.qo_indptr[r + 1] - qo_begin;
    const int32_t kv_len = batch.kv_lens[r];
    const int64_t kv_begin = batch.kv_indptr != nullptr ? batch.kv_indptr[r] : kv_cumulated;
    requests[r] = {qo_begin, qo_len, static_cast<int32_t>(kv_begin), kv_len};
    kv_cumulated += kv_len;
    collect_request(r, qo_len, kv_len);
  }
  num_row_tiles_ = static_cast<int32_t>(next_row_tile_ - row_tiles_.data());
  schedule_.total_cost *= shape_.num_kv_heads;
}

void Scheduler::collect_request(int32_t request, int32_t qo_len, int32_t kv_len) {
  const ScheduleShape& shape = shape_;
  const int kv_shift = kv_shift_;
  const bool causal = shape.causal;
  const int64_t window = shape.window_left >= 0 ? shape.window_left : INT64_MAX / 2;
  const int64_t offset = int64_t{kv_len} - qo_len;  // query i stands at key offset + i
  int32_t* class_sizes = class_sizes_.data();
  RowTile* next = next_row_tile_;
  int64_t total = 0;

  const int32_t tile_q = shape.tile_q;
  const int32_t all_rows = qo_len * shape.group_size;
  const int32_t num_full = all_rows >> q_shift_;
  const int32_t rest = all_rows & (tile_q - 1);
  const int32_t num_tiles = num_full + (rest > 0 ? 1 : 0);
  const bool in_group = shape.item_steps > 0 && num_tiles > 1;
  if (in_group) {
    const auto first = static_cast<int32_t>(next - row_tiles_.data());
    groups_[static_cast<size_t>(num_groups_++)] = {first, num_tiles};
  }

  const auto add = [&](int32_t row_tile, int32_t num_rows, int64_t fixed, int64_t per_step,
                       int64_t first_query, int64_t last_query) {
    const int64_t end = causal ? std::clamp<int64_t>(offset + last_query + 1, 0, kv_len) : kv_len;
    const int64_t begin = round_down(std::max<int64_t>(offset + first_query - window, 0), kv_shift);
    const KeyRange keys = key_range(begin, end);
    const int64_t cost = fixed + ceil_shift(keys.end - keys.begin, kv_shift) * per_step;
    const uint16_t cost_class = in_group ? kGrouped : cost_class_of(cost);
    ++class_sizes[cost_class];
    total += cost;
    *next++ = {cost, request, row_tile, keys, static_cast<uint16_t>(num_rows), cost_class};
  };

  // Of full tiles: their cost is known, and the query and head of their first row advance by the
  // same numbers, so that there is no division per tile.
  int32_t query = 0;
  int32_t head = 0;
  for (int32_t t = 0; t < num_full; ++t) {
    const int32_t first_query = query;
    query += queries_per_tile_;
    head += heads_per_tile_;
    if (head >= shape.group_size) {
      head -= shape.group_size;
      ++query;
    }
    add(t, tile_q, full_tile_cost_, full_step_cost_, first_query, query - (head == 0 ? 1 : 0));
  }
  if (rest > 0) {
    add(num_full, rest, tile_cost(shape.cost, rest), step_cost(shape.cost, rest), query,
        qo_len - 1);
  }
  next_row_tile_ = next;
  schedule_.total_cost += total;
}

void Scheduler::order_longest_first() {
  // class_sizes_ becomes the write position of each class.
  int32_t position = 0;
  for (int32_t& size : class_sizes_) position += std::exchange(size, position);
  const RowTile* tiles = row_tiles_.data();
  int32_t* order = order_.data();
  num_ordered_ = class_sizes_[kGrouped];
  for (int32_t i = 0; i < num_row_tiles_; ++i) order[class_sizes_[tiles[i].cost_class]++] = i;
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
    const int64_t head_cost = scheduler_.row_tiles_[static_cast<size_t>(row_tile)].head_cost;
    const int64_t cost = head_cost * num_heads;
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
  for (int32_t g = 0; g < num_groups_; ++g) {
    const Group& group = groups_[static_cast<size_t>(g)];
    const int32_t at_once = heads_per_item(group, share);
    for (int32_t head = 0; head < num_heads; head += at_once) {
      // From the end: with a causal mask the last row tile is the longest.
      for (int32_t i = group.first + group.count - 1; i >= group.first; --i) {
        dealer.deal(i, head, std::min(at_once, num_heads - head));
      }
    }
  }
  for (int32_t n = 0; n < num_ordered_; ++n) {
    dealer.deal(order_[static_cast<size_t>(n)], 0, num_heads);
  }
  num_dealt_ = dealer.num_dealt();
  num_left_ = dealer.num_left();
  if (num_groups_ > 0) sort_left_items();
  std::copy(schedule_.cta_cost.begin(), schedule_.cta_cost.end(), dealt_cost_.begin());
}

int64_t Scheduler::cost_of(const Item& item) const {
  return row_tiles_[static_cast<size_t>(item.row_tile)].head_cost * item.num_heads;
}

void Scheduler::sort_left_items() {
  class_sizes_.fill(0);
  const std::span left(left_.data(), static_cast<size_t>(num_left_));
  for (const Item& item : left) ++class_sizes_[cost_class_of(cost_of(item))];
  int32_t position = 0;
  for (int32_t& size : class_sizes_) position += std::exchange(size, position);
  for (const Item& item : left) {
    sorted_[static_cast<size_t>(class_sizes_[cost_class_of(cost_of(item))]++)] = item;
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

/// What a queue is to have beyond its share at first, for the cuts of what is left.
int64_t Scheduler::least_extra(int64_t share) const {
  int32_t rows = 0;
  for (int32_t n = 0; n < num_left_; ++n) {
    const auto i = static_cast<size_t>(left_[static_cast<size_t>(n)].row_tile);
    rows = std::max<int32_t>(rows, row_tiles_[i].num_rows);
  }
  const int64_t tile = tile_cost(shape_.cost, rows);
  const int64_t granule = shape_.granule() * step_cost(shape_.cost, rows);
  const int64_t split = split_cost(shape_.cost, rows);
  // What one cut may add: the fixed cost of one more tile, a granule that is left, or a cut that is
  // not worth it.
  const int64_t cut = tile + granule + split;
  constexpr int64_t kUnnoticed = 64;  // such a part of a queue is not worth another try
  const int64_t least = std::clamp(share / kUnnoticed, cut / 4, 2 * cut) + 1;
  if (num_groups_ > 0) return least;
  // Without groups most queues will have a cut at both ends: twice as much, to save a second try.
  return std::max(least, std::min(tile + granule / 2 + 2 * split, 2 * share / kUnnoticed));
}

/// As many as make the item steps, but enough items to fill the queues with.
int32_t Scheduler::heads_per_item(const Group& group, int64_t share) const {
  constexpr int64_t kItemsPerCta = 4;
  // The row tile in the middle costs about the average.
  const RowTile& tile = row_tiles_[static_cast<size_t>(group.first + group.count / 2)];
  const int64_t wanted = std::min(shape_.item_steps * full_step_cost_, share / kItemsPerCta) /
                         std::max<int64_t>(tile.head_cost, 1);
  return static_cast<int32_t>(std::clamp<int64_t>(wanted, least_heads_, shape_.num_kv_heads));
}

/// Lays the items that were not dealt end to end, over (head, step), and cuts where a CTA is full.
class Scheduler::Cutter {
 public:
  Cutter(Scheduler& scheduler, int64_t capacity)
      : scheduler_(scheduler),
        shape_(scheduler.shape_),
        loads_(scheduler.schedule_.cta_cost.data()),
        kv_shift_(scheduler.kv_shift_),
        granule_(shape_.granule()),
        capacity_(capacity) {}

  void lay(const Item& item) {
    const RowTile& tile = scheduler_.row_tiles_[static_cast<size_t>(item.row_tile)];
    tile_ = tile;
    num_steps_ = ceil_shift(tile.keys.end - tile.keys.begin, kv_shift_);
    per_step_ = step_cost(shape_.cost, tile.num_rows);
    fixed_ = tile_cost(shape_.cost, tile.num_rows);
    split_cost_ = split_cost(shape_.cost, tile.num_rows);
    head_ = item.head;
    room_ = capacity_ - loads_[cta_];
    const int32_t heads_end = item.head + item.num_heads;
    while (head_ < heads_end) {
      const bool last_cta = cta_ + 1 == shape_.num_ctas;
      const int64_t rest_cost =
          fixed_ + (num_steps_ - step_) * per_step_ + (split_ >= 0 ? split_cost_ : 0);
      if (last_cta || rest_cost <= room_) {
        const int32_t left = split_ < 0 ? heads_end - head_ : 1;
        const bool all = last_cta || left * rest_cost <= room_;
        finish_heads(all ? left : static_cast<int32_t>(room_ / rest_cost), rest_cost);
        continue;
      }
      const int32_t steps = steps_that_fit();
      // What a cut costs must be won by it.
      if (steps <= 0 || steps * per_step_ < split_cost_) {
        next_cta();
      } else if (!open_split()) {
        finish_heads(1, rest_cost);  // no slot for a further piece: the load stays here
      } else {
        place(1, step_ + steps, fixed_ + steps * per_step_ + split_cost_);
        step_ += steps;
        next_cta();
      }
    }
  }

 private:
  /// Steps of the current head that the room holds, in whole granules and leaving at least one.
  int32_t steps_that_fit() const {
    const int64_t room = room_ - fixed_ - split_cost_;
    if (room < per_step_) return 0;
    const int64_t steps = std::min<int64_t>(room / per_step_, num_steps_ - step_ - 1);
    return static_cast<int32_t>(steps) / granule_ * granule_;
  }

  /// Makes sure that the current head is a split with a slot for the next piece and for the rest.
  bool open_split() {
    Schedule& schedule = scheduler_.schedule_;
    const bool chunked = shape_.chunk_kv > 0;
    const int32_t chunks = (num_steps_ + granule_ - 1) / granule_;  // each has a slot of its own
    const int32_t needed = chunked ? (split_ < 0 ? chunks : 0) : 2;
    if (schedule.num_slots + needed > shape_.max_partial_slots) return false;
    if (split_ >= 0) return true;
    split_ = static_cast<int32_t>(schedule.splits.size());
    const int32_t reserved = chunked ? chunks : 0;
    schedule.splits.push_back(
        {tile_.request, tile_.row_tile, head_, schedule.num_slots, reserved, 0});
    schedule.num_slots += reserved;
    return true;
  }

  void finish_heads(int32_t num_heads, int64_t cost_of_each) {
    place(num_heads, num_steps_, cost_of_each * num_heads);
    head_ += num_heads;
    step_ = 0;
    split_ = -1;
  }

  void place(int32_t num_heads, int32_t end_step, int64_t cost) {
    Schedule& schedule = scheduler_.schedule_;
    int32_t slot = -1;
    if (split_ >= 0) {
      SplitTile& split = schedule.splits[static_cast<size_t>(split_)];
      const bool chunked = shape_.chunk_kv > 0;
      slot = split.slot_begin + (chunked ? step_ / granule_ : split.num_pieces);
      ++split.num_pieces;
      if (!chunked) {
        split.num_slots = split.num_pieces;
        ++schedule.num_slots;
      }
    }
    const KeyRange keys = tile_.keys;
    const int32_t begin = keys.begin + (step_ << kv_shift_);
    const int32_t end = end_step == num_steps_ ? keys.end : keys.begin + (end_step << kv_shift_);
    scheduler_.pieces_[static_cast<size_t>(scheduler_.num_pieces_++)] = {
        {tile_.request, tile_.row_tile, head_, num_heads, begin, end, slot, split_}, cta_};
    loads_[cta_] += cost;
    room_ -= cost;
  }

  void next_cta() {
    ++cta_;
    room_ = capacity_ - loads_[cta_];
  }

  Scheduler& scheduler_;
  const ScheduleShape shape_;
  int64_t* const loads_;
  const int kv_shift_;
  const int32_t granule_;  // steps between possible cuts
  const int64_t capacity_;
  int64_t room_ = 0;  // of the current CTA
  int32_t cta_ = 0;

  RowTile tile_ = {};
  int32_t num_steps_ = 0;
  int64_t per_step_ = 0;
  int64_t fixed_ = 0;
  int64_t split_cost_ = 0;
  int32_t head_ = 0;
  int32_t step_ = 0;    // of the head, already placed
  int32_t split_ = -1;  // of the head, once it is cut
};

/// Places what is left. Returns by how much the last queue, which takes the rest, is longer than
/// `capacity`.
int64_t Scheduler::place_the_rest(int64_t capacity) {
  std::copy(dealt_cost_.begin(), dealt_cost_.end(), schedule_.cta_cost.begin());
  schedule_.splits.clear();
  schedule_.num_slots = 0;
  num_pieces_ = 0;
  num_whole_ = num_dealt_;
  Cutter cutter(*this, capacity);
  if (num_groups_ > 0) {
    // What no queue can hold is cut while there is room.
    int32_t first = 0;
    while (first < num_sorted_ && cost_of(sorted_[static_cast<size_t>(first)]) > capacity) {
      cutter.lay(sorted_[static_cast<size_t>(first++)]);
    }
    place_whole(first, capacity);
  }
  for (int32_t n = 0; n < num_left_; ++n) cutter.lay(left_[static_cast<size_t>(n)]);
  return schedule_.cta_cost.back() - capacity;
}

void Scheduler::fill_queues(int64_t share) {
  constexpr int kTries = 16;
  constexpr int64_t kWorthOfGroups = 8;  // such a part of a queue is what sharing keys may cost
  // What cuts add is known afterwards: capacities are tried, each larger by what the last lacked.
  int64_t extra = least_extra(share);
  bool in_groups = num_groups_ > 0;
  for (int i = 0; i < kTries; ++i) {
    const int64_t excess = place_the_rest(share + extra);
    if (excess <= 0) return;
    extra += std::clamp(excess / shape_.num_ctas * 5 / 4, extra / 2, extra) + 1;
    if (in_groups && extra > share / kWorthOfGroups) {
      // Too few items to even out what the order of groups left: longest first from the start.
      in_groups = false;
      deal_items(share, 0);
      extra = least_extra(share);
    }
  }
}

void Scheduler::write_queues() {
  // Parts of a split come first in their queue: their merges then overlap with what is whole.
  auto& indptr = schedule_.cta_indptr;
  std::fill(indptr.begin(), indptr.end(), 0);
  const std::span pieces(pieces_.data(), static_cast<size_t>(num_pieces_));
  const std::span dealt(dealt_.data(), static_cast<size_t>(num_whole_));
  for (const Placed& p : pieces) ++indptr[static_cast<size_t>(p.cta) + 1];
  for (const Item& item : dealt) ++indptr[static_cast<size_t>(item.cta) + 1];
  for (size_t c = 1; c < indptr.size(); ++c) indptr[c] += indptr[c - 1];

  schedule_.tiles.resize(pieces.size() + dealt.size());
  // indptr[c] serves as the write position of queue c, which leaves it at the begin of c + 1.
  WorkTile* tiles = schedule_.tiles.data();
  int32_t* position = indptr.data();
  const RowTile* row_tiles = row_tiles_.data();
  for (const Placed& p : pieces) {
    if (p.tile.split >= 0) tiles[position[p.cta]++] = p.tile;
  }
  for (const Placed& p : pieces) {
    if (p.tile.split < 0) tiles[position[p.cta]++] = p.tile;
  }
  for (const Item& item : dealt) {
    const RowTile& t = row_tiles[item.row_tile];
    tiles[position[item.cta]++] = {t.request,    t.row_tile, item.head, item.num_heads,
                                   t.keys.begin, t.keys.end, -1,        -1};
  }
  std::copy_backward(indptr.begin(), indptr.end() - 1, indptr.end());
  indptr[0] = 0;
}

}  // namespace flashplan
