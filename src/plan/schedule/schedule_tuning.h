// SPDX-License-Identifier: Apache-2.0
// The numbers by which the scheduler divides work among queues. They were found by trying batches
// of many kinds (docs/tuning/planner.md). The costs of work are in plan/kernel/tuning.cpp.
#pragma once

#include <cstdint>

namespace flashplan {

/// A field that ends in _part has the value n for 1 / n of a queue's share, or of the longest
/// queue.
struct ScheduleTuning {
  // The most items of a plan, which bounds its memory. If a batch had more, items get more heads.
  int64_t most_items = 1 << 14;
  // The least number of items that a queue's share has room for, which bounds the size of an item.
  int64_t items_per_queue = 4;
  // A group of at most this many row tiles begins every second round of dealing one queue later.
  // Otherwise the same queues could get tiles of the same lengths in every round.
  int32_t few_row_tiles = 8;

  // By how much the longest queue may exceed its share: by paired_heads_part if several heads of a
  // decode are then read together; by groups_part if row tiles are then dealt in groups, which
  // share keys in L2.
  int64_t paired_heads_part = 16;
  int64_t groups_part = 8;

  // For plans that cut nothing: the first try leaves least_undealt_part of a queue's share undealt,
  // and later tries leave larger parts undealt. A later try is used if it shortens the longest
  // queue by more than uncut_slack_part of the share.
  int64_t least_undealt_part = 16;
  int64_t uncut_slack_part = 32;

  // How many capacities of queues are tried until the work fits.
  int most_tries = 16;
  // The next try adds 5/4 of the capacity that was missing, because a larger capacity moves the
  // cuts and may add others.
  int64_t lacking_numerator = 5;
  int64_t lacking_denominator = 4;
  // The least part of the slack by which a try enlarges it. With TileSet::queues_wait this part is
  // smaller, because the first capacity is nearly right.
  int64_t least_growth_part = 2;
  int64_t least_growth_part_of_waiting = 16;
  // The first slack is between 1 / least_cut_part and cuts_of_queue times the most that a cut may
  // cost: most cuts cost less, and a queue has at most two cuts.
  int64_t least_cut_part = 4;
  int64_t cuts_of_queue = 2;
  int64_t slack_part = 64;  // a slack below this part of a share is not worth another try

  // How many smaller capacities are tried after the work has fitted.
  int reductions = 2;
  int reductions_with_prompts = 4;
  int64_t reduction_part = 24;  // a gain below this part of a share is not worth a try
  int64_t reduction_part_with_prompts = 64;

  // Prefixes that come first in the queues are cut into equal pieces of at most prefix_steps steps,
  // if queues are on average at least queue_to_prefixes times as long as such a piece.
  int64_t prefix_steps = 4;
  int64_t queue_to_prefixes = 2;
};
inline constexpr ScheduleTuning kScheduleTuning;

}  // namespace flashplan
