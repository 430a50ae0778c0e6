// SPDX-License-Identifier: Apache-2.0
// The records of a schedule that kernels read besides WorkTile.
#pragma once

#include <cstdint>

#include "abi/host_device.h"
#include "abi/packed_rows.h"
#include "flashplan/schedule.h"

namespace flashplan {

/// A block of the sparse matrix: tokens of q against the keys of one row of the page table. Each
/// request is one segment; so is a prefix that neighbouring requests share, with the tokens of all
/// of them and the page table row of the first. 16 bytes: a GPU copies it at once.
struct Segment {
  int32_t qo_begin;  // first token, a row of q and o
  int32_t qo_len;    // tokens
  int32_t position;  // of the first token among the keys; see Mask
  int32_t kv_row;    // paged: row of the page table; ragged: first row of k and v
};

/// The position of a prefix that requests share: after all keys, so that its tokens see all of
/// them. No shared prefix is so long.
constexpr int32_t kPrefixPosition = 0x7fffffff - 1024;

FLASHPLAN_HOST_DEVICE bool is_prefix(const Segment& segment) {
  return segment.position >= kPrefixPosition;
}

/// Rows whose keys are shared by several work tiles, for one kv head. State i of row r is partial
/// row first_partial_row + i * tile_q + r; states are in the order of their keys.
///
/// Each work tile that has written states of a merge arrives at it; the last one to arrive finishes
/// it. Rows of one request are then written to o and lse: their own states are merged, and those of
/// the prefixes that their request shares with others, from `parent` to parent. The rows of a
/// shared prefix are those of several requests, its readers: the prefix then arrives at the merge
/// of each of them.
struct Merge {
  PackedRows rows;
  int32_t kv_head;
  int32_t first_partial_row;
  int32_t num_states;
  int32_t num_pieces;    // arrivals to wait for: of own work tiles, and of each prefix of the rows
  int32_t parent;        // merge of the innermost prefix that the rows are part of; -1: none
  int32_t first_reader;  // merge of a prefix's first request
  int32_t num_readers;   // 0: the rows of one request
  int32_t reader_step;   // from one reader to the next
};

/// Counters of finished pieces, one for each warpgroup that merges rows of its own.
constexpr int32_t kArrivalsPerMerge = 4;

/// The begin of a work queue in one place: what a CTA would otherwise look up one after the other.
struct alignas(16) QueueStart {
  int32_t begin;  // of its tiles
  int32_t end;
  int32_t unused[2];
  WorkTile tiles[2];  // the first ones, as far as there are so many
  Segment segments[2];
};

}  // namespace flashplan
