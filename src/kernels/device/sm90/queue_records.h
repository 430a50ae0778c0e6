// SPDX-License-Identifier: Apache-2.0
// Where the records of work tiles lie in QueueStart, with which a queue begins, and in shared
// memory. A record is the words of a tile, then those of its segment, as they lie in Sm90Context.
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/shared_memory.h"

namespace flashplan::device {

/// Sizes of records, and places in QueueStart, in words of 4 bytes.
struct RecordWords {
  static constexpr int kFirstRecords = 2;  // records in QueueStart
  static constexpr int kTile = sizeof(WorkTile) / 4;
  static constexpr int kSegment = sizeof(Segment) / 4;
  static constexpr int kQueue = sizeof(QueueStart) / 4;
  static constexpr int kBegin = FLASHPLAN_OFFSET_OF(QueueStart, begin) / 4;
  static constexpr int kEnd = FLASHPLAN_OFFSET_OF(QueueStart, end) / 4;
  static constexpr int kPrepared = FLASHPLAN_OFFSET_OF(QueueStart, first_prepared) / 4;
  static constexpr int kTiles = FLASHPLAN_OFFSET_OF(QueueStart, tiles) / 4;
  static constexpr int kSegments = FLASHPLAN_OFFSET_OF(QueueStart, segments) / 4;
  static constexpr int kAllFirst = kFirstRecords * (kTile + kSegment);
  static_assert(kQueue <= 32);
  static_assert(kSegments == kTiles + kFirstRecords * kTile);
  static_assert(FLASHPLAN_OFFSET_OF(Sm90Context, tile) == 0 &&
                FLASHPLAN_OFFSET_OF(Sm90Context, segment) == sizeof(WorkTile));
};

/// The record that a word of QueueStart belongs to.
struct RecordPlace {
  int record;
  int word;  // word of that record
};
/// Returns which word of which record is word RecordWords::kTiles + `index` of QueueStart.
FLASHPLAN_DEVICE RecordPlace first_record_place(int index) {
  using Words = RecordWords;
  constexpr int kAllTileWords = Words::kFirstRecords * Words::kTile;
  const bool is_tile = index < kAllTileWords;
  const int record = is_tile ? index / Words::kTile : (index - kAllTileWords) / Words::kSegment;
  const int word = is_tile ? index % Words::kTile : Words::kTile + index % Words::kSegment;
  return {record, word};
}

}  // namespace flashplan::device
