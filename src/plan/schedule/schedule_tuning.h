// SPDX-License-Identifier: Apache-2.0
// The numbers by which the scheduler divides work among queues. They were found by trying batches
// of many kinds (docs/tuning/planner.md). What a kernel family takes for its work is in
// plan/kernel/tuning.cpp.
#pragma once

#include <cstdint>

namespace flashplan {

/// A `...Part` of n stands for 1 / n of a queue's share, or of the longest queue.
struct ScheduleTuning {
  // Items.
  int64_t most_items = 1 << 14;  // of a plan, which bounds its memory; items then have more heads
  int64_t items_per_queue = 4;   // at least, of a long request
  // Rounds of a group of so few row tiles move on; see Dealer::begin_group().
  int32_t few_row_tiles = 8;

  // What is worth an imbalance.
  int64_t paired_heads_part = 16;  // reading several heads of a decode together
  int64_t groups_part = 8;         // groups, by which CTAs share keys in the L2 cache

  // Where nothing is cut: the least part of a queue's share that is not dealt, and what is worth
  // another try with more.
  int64_t least_undealt_part = 16;
  int64_t uncut_slack_part = 32;

  // Tries of capacities, until the work fits.
  int most_tries = 16;
  int64_t lacking_numerator = 5;    // a try adds 5/4 of what was missing, because a larger capacity
  int64_t lacking_denominator = 4;  // moves the cuts and may add others
  // The least that a try adds, as a part of the slack so far. With `queues_wait` the first capacity
  // is nearly right.
  int64_t least_growth_part = 2;
  int64_t least_growth_part_of_waiting = 16;
  // How much of a cut's cost may be enough as slack: most cuts add less than their worst case, and
  // a queue has at most two cuts.
  int64_t least_cut_part = 4;
  int64_t cuts_of_queue = 2;
  int64_t slack_part = 64;  // less of a queue is not worth another try

  // Tries of smaller capacities, after the work has fitted.
  int reductions = 2;
  int reductions_with_prompts = 4;
  int64_t reduction_part = 24;  // less of a queue is not worth a try
  int64_t reduction_part_with_prompts = 64;

  // Prefixes that come first: the most steps of a piece, and how many times their part a queue is.
  int64_t prefix_steps = 4;
  int64_t queue_to_prefixes = 2;
};
inline constexpr ScheduleTuning kScheduleTuning;

}  // namespace flashplan
