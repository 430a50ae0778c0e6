// SPDX-License-Identifier: Apache-2.0
// How the rows of a merge are divided among the CTAs that wrote its states. If the last CTA to
// arrive merged all rows, the other CTAs would be idle meanwhile, and the merge can be long: 16
// states of 64 rows with 128 dims are 512 KB.
#pragma once

#include "kernels/device/attention_state.h"

namespace flashplan::device {

/// One of `count` equal parts of a merge's rows. If `count` is 0, it has no rows.
struct MergePart {
  int32_t index;
  int32_t count;

  FLASHPLAN_DEVICE int32_t begin(int32_t num_rows) const { return num_rows * index / count; }
  FLASHPLAN_DEVICE int32_t end(int32_t num_rows) const { return num_rows * (index + 1) / count; }
};
constexpr MergePart kNoRows = {0, 0};
constexpr MergePart kAllRows = {0, 1};

// The bits of the counter of a merge that may be divided. A CTA that has no other work left is a
// helper: it waits until the last CTA has arrived, and then the helpers and the last CTA each merge
// a part of the rows. In the sm90 kernels, warpgroups take the place of CTAs.
//
//   1. Until the last arrival, the low bits are the number of arrivals, and the number of helpers
//      never falls. Helper i is the one that arrived when there were i others.
//   2. A helper may leave only while some CTA has not arrived yet. It sets kHelperLeft by a
//      compare-and-swap, which fails if a CTA arrives meanwhile. The bit stays set until the
//      counter becomes 0.
//   3. Only the CTA that arrives last decides, once. If there are helpers and none of them has
//      left, it sets kDivided and takes the last part; helper i takes part i. Otherwise it sets
//      the counter to 0 and merges all rows; helpers that still wait read the 0 and merge nothing.
//   4. After kDivided, the low bits count the helpers that have read it. The last helper to read it
//      sets the counter to 0, because no other helper reads it any more.
constexpr uint32_t kArrivalBits = 0xffff;   // arrivals; once divided, the helpers that know it
constexpr uint32_t kHelper = 1U << 16;      // added by each helper, in 14 bits
constexpr uint32_t kHelperLeft = 1U << 30;  // a helper stopped waiting: nobody may divide
constexpr uint32_t kDivided = 1U << 31;     // all have arrived, and each helper has a part

/// Merges of up to this many rows are not divided. With up to 256 dims, such a merge takes no
/// longer than it takes to tell other CTAs that they may help.
constexpr int32_t kFewMergedRows = 16;
FLASHPLAN_DEVICE bool may_divide(const Merge& merge, int32_t few_rows = kFewMergedRows) {
  return merge.rows.num_rows > few_rows && merge.num_pieces < static_cast<int32_t>(kArrivalBits);
}

/// Arrives at a merge, and returns the rows that the caller has to merge. One thread of each CTA
/// calls it, after a barrier of the CTA; after another barrier the other threads may read the
/// partial rows. `has_time`: the caller has no other work left. Merges of up to `few_rows` are not
/// divided. `kMayDivide`: false if the caller never has merges of more than a few rows.
///
/// A helper stops waiting after 20 us: it may be waiting for a CTA that can only start on this SM
/// when the helper has ended.
template <bool kMayDivide = true>
FLASHPLAN_DEVICE MergePart arrive_at_merge(int32_t* counter, const Merge& merge, bool has_time,
                                           int32_t few_rows = kFewMergedRows) {
  if (!kMayDivide || !may_divide(merge, few_rows)) {
    if (arrive(counter) + 1 != merge.num_pieces) return kNoRows;
    *counter = 0;  // for the next run
    return kAllRows;
  }
  const auto num_pieces = static_cast<uint32_t>(merge.num_pieces);
  const auto helpers_of = [](uint32_t word) {
    return static_cast<int32_t>(word % kHelperLeft / kHelper);
  };
  const auto before =
      static_cast<uint32_t>(arrive(counter, static_cast<int32_t>(has_time ? kHelper + 1 : 1)));
  const int32_t own = helpers_of(before);
  if ((before & kArrivalBits) + 1 == num_pieces) {
    if (own == 0 || (before & kHelperLeft) != 0) {
      *counter = 0;
      return kAllRows;
    }
    const uint32_t divided = kDivided | static_cast<uint32_t>(own) * kHelper;
    store_release(counter, static_cast<int32_t>(divided));
    return {own, own + 1};
  }
  if (!has_time) return kNoRows;
  const int64_t begin = clock64();
  for (;;) {
    const auto now = static_cast<uint32_t>(load_relaxed(counter));
    if (now == 0) return kNoRows;  // another helper left, so the last CTA merges all
    if ((now & kDivided) != 0) {
      const int32_t helpers = helpers_of(now);
      const auto known = static_cast<uint32_t>(arrive(counter)) & kArrivalBits;
      if (known + 1 == static_cast<uint32_t>(helpers)) *counter = 0;
      return {own, helpers + 1};
    }
    if (clock64() - begin > kMostClocksOfWait && (now & kArrivalBits) != num_pieces &&
        compare_and_swap(counter, static_cast<int32_t>(now),
                         static_cast<int32_t>(now | kHelperLeft))) {
      return kNoRows;
    }
  }
}

}  // namespace flashplan::device
