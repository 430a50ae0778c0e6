// SPDX-License-Identifier: Apache-2.0
// The records of a schedule that kernels read besides WorkTile.
#pragma once

#include <cstdint>

#include "abi/host_device.h"
#include "abi/packed_rows.h"
#include "flashplan/schedule.h"

namespace flashplan {

/// A block of the sparse attention matrix: tokens of q against the keys of one row of the page
/// table. Each request is one segment. A prefix that neighbouring requests share is one more
/// segment, with the tokens of all these requests and the page table row of the first one. A
/// Segment has 16 bytes, so that a GPU copies it by one instruction.
struct Segment {
  int32_t qo_begin;  // first token, a row of q and o
  int32_t qo_len;    // number of tokens
  int32_t position;  // where the first token stands among the keys
  int32_t kv_row;    // paged: row of the page table; ragged: first row of k and v
};

/// The position of a shared prefix's first token: after all keys, so that all tokens see all keys
/// of the prefix. No prefix has so many keys.
constexpr int32_t kPrefixPosition = 0x7fffffff - 1024;

FLASHPLAN_HOST_DEVICE bool is_prefix(const Segment& segment) {
  return segment.position >= kPrefixPosition;
}

/// Rows of one kv head whose keys are divided among several work tiles. State i of row r is in
/// partial row first_partial_row + i * tile_q + r; states are in the order of their keys. Where
/// work tiles of a request that shares no prefix have several kv heads, a state has the rows of all
/// these heads: row h * num_rows + r of the state is row r of head number h.
///
/// Each work tile that has written states of a merge arrives at the merge, and the last one to
/// arrive completes it. If the rows are those of a request, this work tile then merges their states
/// with the states of the prefixes around them, which it finds by following `parent`, and writes o
/// and lse. A shared prefix has the rows of several requests, its readers. When the merge of the
/// prefix is complete, the prefix arrives at the merge of each reader, as a work tile does.
struct Merge {
  PackedRows rows;
  int32_t kv_head;
  int32_t first_partial_row;
  int32_t num_states;
  int32_t num_pieces;    // arrivals that complete it: of work tiles, and of a request's prefixes
  int32_t parent;        // merge of the innermost prefix around the rows; -1: none
  int32_t first_reader;  // if the rows are a prefix's: the merge of its first reader
  int32_t num_readers;   // readers of the prefix; 0: the rows are those of one request
  int32_t reader_step;   // distance from the merge of one reader to that of the next reader
};

/// The most rows of a work tile that has several kv heads but only some of their keys, because no
/// kernel can merge the states of several heads with more rows.
constexpr int32_t kMostPairedRows = 8;

/// The most work tiles of a queue that have only some keys of their kv head: one whose head has
/// other keys in an earlier queue, and one whose head has other keys in a later queue. Work tiles
/// of shared prefixes, and of requests that read them, do not count.
constexpr int32_t kMostSplitsPerQueue = 2;

/// Counts the arrivals at a merge, which is complete after Merge::num_pieces arrivals. If each
/// warpgroup of a tile, or each CTA of a pair, merges 64 rows of its own, counter i is for the rows
/// of warpgroup or CTA i. Otherwise counter 0 is for all rows. In the CPU engine a thread takes the
/// place of a CTA.
///
///   1. When a run begins, all counters are 0: a GPU kernel leaves them at 0, and the CPU engine
///      clears them before each run.
///   2. A CTA that has computed a work tile writes the tile's states to memory and then arrives: it
///      adds 1 to the counter of the tile's merge. The last CTA to arrive at a request's merge
///      merges the states, which have all been written by then. In the sm90 kernels each warpgroup
///      arrives for its own rows of a tile. For tiles of requests that read a shared prefix, their
///      CTA arrives later, when it has computed all work tiles of its queue.
///   3. A shared prefix has a merge of its own. The last CTA to arrive there then also arrives at
///      the merge of each request that reads the prefix.
///   4. Each CTA but the last to arrive at a merge is done with this merge once it has arrived: it
///      does not change the counter again, and reads no states. There are two exceptions.
///      The rows of a large merge can be divided among several CTAs, each of which merges some of
///      the rows. kernels/device/merge_part.h says what the bits of such a counter mean.
///      In the sm90 kernels, a CTA that arrives at a reader's merge for a prefix (see 3) can be the
///      last to arrive. It then does not merge the states, but sets a mark in the counter. A CTA
///      that has computed its whole work queue looks for such marks, and merges the states
///      (kernels/device/sm90/reader_merges.h).
struct Arrivals {
  int32_t counters[4];
};

/// Copies of what a CTA reads first: the bounds of its work queue, the queue's first two work
/// tiles, and the segments of these tiles. The CTA loads all of it at once. Without the copies it
/// would need three loads in a row: the bounds tell where the first tile is, and the tile tells
/// where its segment is.
struct alignas(16) QueueStart {
  int32_t begin;  // index of the queue's first work tile
  int32_t end;
  int32_t first_prepared[2];  // entries of PreparedKv::first_tiles for `segments`
  WorkTile tiles[2];          // the first two work tiles; any tiles if the queue has fewer
  Segment segments[2];
};

}  // namespace flashplan
