// SPDX-License-Identifier: Apache-2.0
// The numbers by which the scheduler divides work among queues. They were found by trying batches
// of many kinds (docs/tuning/planner.md). The costs of work are in plan/kernel/tuning.cpp.
#pragma once

#include <cstdint>

namespace flashplan {

/// A queue's share is the cost that it would get if the work were divided perfectly. An item is
/// some kv heads of a row tile. A field whose name has _part holds n, and stands for 1 / n of a
/// share or of the quantity that its comment names.
struct ScheduleTuning {
  // The most items of a plan, which bounds its memory. If the largest batch would have more, each
  // item gets more heads.
  int64_t most_items = 1 << 14;
  // An item of several heads may cost at most 1 / items_per_queue of a queue's share.
  int64_t items_per_queue = 4;
  // A group of at most this many row tiles begins every second round of dealing one queue later.
  // Otherwise the same queues could get tiles of the same lengths in every round.
  int32_t few_row_tiles = 8;

  // By how much the longest queue may exceed its share: by paired_heads_part to read several heads
  // of a decode together, and by groups_part to deal row tiles in groups, whose CTAs share keys in
  // L2.
  int64_t paired_heads_part = 16;
  int64_t groups_part = 8;

  // For plans that cut nothing. Items are dealt to the queues in turn, up to a part of the share,
  // and the items that are left go to the least loaded queues. The first try leaves
  // least_undealt_part of the share undealt, and later tries leave more. A later try is used if it
  // shortens the longest queue by more than uncut_slack_part of the share.
  int64_t least_undealt_part = 16;
  int64_t uncut_slack_part = 32;

  // The capacity of a queue is its share and some slack, because cuts add work. At most most_tries
  // capacities are tried until the work fits.
  int most_tries = 16;
  // The next try has 5/4 of the missing capacity more, because with a larger capacity the cuts are
  // at other places, and there may be more of them.
  int64_t lacking_numerator = 5;
  int64_t lacking_denominator = 4;
  // Each try enlarges the slack by at least least_growth_part of it. With TileSet::queues_wait this
  // is the smaller least_growth_part_of_waiting, because the first capacity is nearly right.
  int64_t least_growth_part = 2;
  int64_t least_growth_part_of_waiting = 16;
  // Bounds of the slack of the first try, in multiples of the most that one cut may cost: at least
  // 1 / least_cut_part, since most cuts cost less, and at most cuts_of_queue, since a queue has at
  // most two cuts.
  int64_t least_cut_part = 4;
  int64_t cuts_of_queue = 2;
  int64_t slack_part = 64;  // the first slack is at least this part of a share, within the bounds

  // How many smaller capacities are tried after the work has fitted, to shorten the longest queue:
  // `reductions`, or in batches with prompts reductions_with_prompts.
  int reductions = 2;
  int reductions_with_prompts = 4;
  int64_t reduction_part = 24;  // no try if the longest queue can shrink by less than this part
  int64_t reduction_part_with_prompts = 64;

  // Prefixes that come first in the queues are cut into equal pieces of at most prefix_steps steps,
  // if queues are on average at least queue_to_prefixes times as long as such a piece.
  int64_t prefix_steps = 4;
  int64_t queue_to_prefixes = 2;
};
inline constexpr ScheduleTuning kScheduleTuning;

}  // namespace flashplan
