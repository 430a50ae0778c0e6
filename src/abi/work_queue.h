// SPDX-License-Identifier: Apache-2.0
// The records of a schedule that kernels read besides WorkTile. Plain data, also for device code.
#pragma once

#include <cstdint>

#include "flashplan/schedule.h"

namespace flashplan {

/// One request, as kernels see it.
struct RequestInfo {
  int32_t qo_begin;  // first row of q and o
  int32_t qo_len;
  int32_t kv_begin;  // first row of ragged k and v
  int32_t kv_len;
};

/// A (row tile, kv head) whose keys are shared by several work tiles. The last of num_pieces to
/// finish merges slots [slot_begin, + num_slots) in ascending order: the order of their keys.
struct SplitTile {
  int32_t request;
  int32_t row_tile;
  int32_t kv_head;
  int32_t slot_begin;
  int32_t num_slots;
  int32_t num_pieces;
};

/// The begin of a work queue in one place: what a CTA would otherwise look up one after the other.
struct alignas(16) QueueStart {
  int32_t begin;  // of its tiles
  int32_t end;
  int32_t unused[2];
  WorkTile tiles[2];  // the first ones, as far as there are so many
  RequestInfo requests[2];
};

}  // namespace flashplan
