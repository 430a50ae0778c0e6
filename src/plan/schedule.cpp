// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule.h"

#include <algorithm>
#include <bit>
#include <cstddef>

namespace flashplan {
namespace {

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
  const auto num_ctas = static_cast<std::size_t>(shape.num_ctas);
  schedule_ = Schedule();
  schedule_.cta_indptr.assign(num_ctas + 1, 0);
  schedule_.cta_cost.assign(num_ctas, 0);
  max_merges_ = bounds.merges;
  prefixes_.reserve(shape, bounds.requests);
  row_tiles_.reserve(shape, bounds.segments, bounds.row_tiles);
  filler_.reserve(shape, bounds.items, bounds.work_tiles, bounds.row_tiles - prefixes);
  next_whole_.resize(num_ctas);
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
  const int32_t num_sharers = prefixes_.empty() ? 0 : prefixes_.num_sharers();
  filler_.fill({row_tiles_, row_tiles_.groups(), row_tiles_.longest_first(),
                row_tiles_.total_cost(), num_sharers},
               memory_.segments, sharing_);
  std::copy(filler_.loads().begin(), filler_.loads().end(), schedule_.cta_cost.begin());
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
    merge.num_pieces = prefixes[static_cast<std::size_t>(prefix)].depth + 2;
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

/// Parts of splits come first: their merges then overlap with what is whole. Where a batch has
/// prompts and decodes, every other queue has its prompts first, the others have them last:
/// decodes, which are bound by memory, run beside prompts, which are not.
void Scheduler::write_queues() {
  const std::span<const Item> whole = filler_.whole();
  const Cutter& cutter = filler_.cutter();
  const bool mixed = !row_tiles_.groups().empty() && !row_tiles_.longest_first().empty();
  const auto prompts_first = [mixed](int32_t cta) { return mixed && cta % 2 == 0; };
  int32_t* const next_whole = next_whole_.data();  // at first the number of whole tiles
  std::fill_n(next_whole, shape_.num_ctas, 0);
  for (const Item& item : whole) ++next_whole[item.cta];
  WorkTile* const tiles = memory_.tiles;
  WorkTile* next = tiles;
  for (int32_t c = 0; c < shape_.num_ctas; ++c) {
    std::span<const WorkTile> pieces = cutter.pieces_of(c);
    next = take_splits(&pieces, next);
    const auto num_pieces = static_cast<int32_t>(pieces.size());
    const auto begin = static_cast<int32_t>(next - tiles);
    const int32_t count = next_whole[c];
    next += prompts_first(c) ? count : 0;
    for (const WorkTile& piece : pieces) *next++ = piece;  // a few: a call would cost more
    next += prompts_first(c) ? 0 : count;
    next_whole[c] = prompts_first(c) ? begin : begin + num_pieces;
    schedule_.cta_indptr[static_cast<std::size_t>(c) + 1] = static_cast<int32_t>(next - tiles);
  }
  for (int pass = 0; pass < (mixed ? 2 : 1); ++pass) {
    for (const Item& item : whole) {
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
  schedule_.first_merge = cutter.first_merge();
  schedule_.merges = {memory_.merges + schedule_.first_merge,
                      static_cast<std::size_t>(max_merges_ - schedule_.first_merge)};
  schedule_.num_cut = cutter.num_cut();
  schedule_.num_partial_rows = cutter.num_partial_rows();
}

}  // namespace flashplan
