// SPDX-License-Identifier: Apache-2.0
// The records of a schedule that kernels read besides WorkTile.
#pragma once

#include <cstdint>

#include "abi/packed_rows.h"
#include "flashplan/schedule.h"

namespace flashplan {

/// A block of the sparse matrix: tokens of q against the keys of one row of the page table. Each
/// request is one segment. 16 bytes: a GPU copies it at once.
struct Segment {
  int32_t qo_begin;  // first token, a row of q and o
  int32_t qo_len;    // tokens
  int32_t position;  // of the first token among the keys; see Mask
  int32_t kv_row;    // paged: row of the page table; ragged: first row of k and v
};

/// Rows of the output whose keys are shared by several work tiles, for one kv head. State i of row
/// r is partial row first_partial_row + i * tile_q + r; states are in the order of their keys. The
/// last work tile to finish its piece merges them.
struct Merge {
  PackedRows rows;
  int32_t kv_head;
  int32_t first_partial_row;
  int32_t num_states;
  int32_t num_pieces;  // work tiles that write these states
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
