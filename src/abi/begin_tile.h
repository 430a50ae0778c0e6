// SPDX-License-Identifier: Apache-2.0
// What a kernel derives from a work tile before it computes: the rows, the keys, and the first key
// that the caller's mask covers.
#pragma once

#include "abi/real_lens.h"

namespace flashplan {

/// The rows and keys of a work tile, fitted to the lengths, page table and mask that only the
/// tensors of run() hold.
struct BegunTile {
  PackedRows rows;
  int32_t request;
  int32_t position;  // where query 0 of the segment stands among the keys
  KeySpan keys;      // may be empty (end <= begin) if the request is shorter than planned
  int32_t first_masked_key;
};

/// Begins a work tile of `segment`: finds its rows, fits its keys and the position of its queries
/// to the real length of the request, leaves out keys without page ids, and looks up the first key
/// that the caller's mask of bits covers. `tile_kv`: the number of keys in a step of the kernel.
FLASHPLAN_HOST_DEVICE BegunTile begin_tile(const AttentionParams& p, int32_t tile_kv,
                                           const WorkTile& tile, const Segment& segment) {
  const int32_t row_begin = tile.row_tile * p.schedule.tile_q;
  const int32_t rows_left = segment.qo_len * p.schedule.group_size.value - row_begin;
  BegunTile begun = {
      .rows = {.segment = tile.segment,
               .qo_begin = segment.qo_begin,
               .row_begin = row_begin,
               .num_rows = rows_left < p.schedule.tile_q ? rows_left : p.schedule.tile_q},
      .request = request_of(tile, segment, p.tensors.pages),
      .position = segment.position,
      .keys = {tile.kv_begin, tile.kv_end},
      .first_masked_key = 0};
  if (has_real_length(p, segment)) {
    Segment fitted = segment;
    fit_to_length(p.mask, begun.rows, p.schedule.group_size, tile_kv,
                  p.tensors.kv_lens[begun.request], fitted, begun.keys);
    begun.position = fitted.position;
  }
  const int32_t keys_on_pages = p.tensors.pages.keys_of(segment.kv_row);
  if (keys_on_pages < begun.keys.end) begun.keys.end = keys_on_pages;
  begun.first_masked_key = first_masked_key(p, begun.request, begun.position);
  return begun;
}

}  // namespace flashplan
