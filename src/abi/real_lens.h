// SPDX-License-Identifier: Apache-2.0
// Lengths that only the device knows. The plan is made for upper bounds, and each work tile is
// changed to fit the real length of its request when it is run.
#pragma once

#include <cstdint>

#include "abi/mask.h"
#include "abi/params.h"

namespace flashplan {

/// Fits a work tile of `rows` and planned `keys` to a request of `kv_len` keys. A length above the
/// planned one counts as the planned one, a negative one as 0. Sets the position of the segment,
/// and `keys`, as a plan with this length would, except that such a plan may divide the keys among
/// its work tiles at other places. Afterwards there may be no keys: keys.end <= keys.begin.
FLASHPLAN_HOST_DEVICE void fit_to_length(const Mask& mask, const PackedRows& rows,
                                         const Divisor& group_size, int32_t tile_kv, int32_t kv_len,
                                         Segment& segment, KeySpan& keys) {
  const int32_t planned_len = segment.position + segment.qo_len;
  if (kv_len < 0) kv_len = 0;
  if (kv_len >= planned_len) return;
  const int32_t first = rows.query(0, group_size);
  const int32_t last = rows.query(rows.num_rows - 1, group_size);
  const KeySpan planned =
      mask.visible_to_queries(first, last, segment.position, planned_len, tile_kv);
  segment.position = kv_len - segment.qo_len;
  const KeySpan real = mask.visible_to_queries(first, last, segment.position, kv_len, tile_kv);
  // With a sliding window the visible keys begin `shift` keys earlier than planned, so the keys of
  // each work tile move by `shift`, a multiple of tile_kv. The planned and the real first key are
  // rounded down by different amounts, so there may be one step of keys more than planned. The
  // last work tile of these rows takes it.
  const int32_t shift = planned.begin - real.begin;
  const bool is_last = keys.end == planned.end;
  keys = {keys.begin - shift, keys.end - shift};
  if (is_last || keys.end > real.end) keys.end = real.end;
}

/// Whether fit_to_length() must be called for the work tiles of a segment. A shared prefix does not
/// need it: all its keys exist, whatever the real lengths are.
FLASHPLAN_HOST_DEVICE bool has_real_length(const AttentionParams& p, const Segment& segment) {
  return p.tensors.kv_lens != nullptr && !is_prefix(segment);
}

/// The number of keys of a request: the real length if run() got one, else the planned length of
/// `segment`.
FLASHPLAN_HOST_DEVICE int32_t real_length(const AttentionParams& p, const Segment& segment,
                                          int32_t request) {
  const int32_t planned = segment.position + segment.qo_len;
  if (p.tensors.kv_lens == nullptr) return planned;
  const int32_t real = p.tensors.kv_lens[request];
  return real < 0 ? 0 : real < planned ? real : planned;
}

/// The request that a work tile belongs to; for a shared prefix, the first of its requests.
FLASHPLAN_HOST_DEVICE int32_t request_of(const WorkTile& tile, const Segment& segment,
                                         const PageTable& pages) {
  return pages.ids != nullptr ? segment.kv_row : tile.segment;
}

/// The first key of `request` for which the caller's mask has a bit; INT32_MAX without a mask.
/// `position`: where the request's first query stands among its real keys.
FLASHPLAN_HOST_DEVICE int32_t first_masked_key(const AttentionParams& p, int32_t request,
                                               int32_t position) {
  if (!p.tensors.mask.is_given) return 0x7fffffff;
  const int32_t begin = p.schedule.mask_begins[request];
  return begin == kAtFirstQuery ? position : begin;
}

/// The number of states that a batch-invariant work tile of `merge` writes, one for each chunk.
/// With a window, fit_to_length() may give the last work tile of a merge one step more than
/// planned, which may begin one more chunk. So that tile always writes one state more than planned.
FLASHPLAN_HOST_DEVICE int32_t num_chunk_states(const WorkTile& tile, const Merge& merge,
                                               const AttentionParams& p) {
  const int32_t chunk_kv = p.schedule.chunk_kv;
  const int32_t planned = (tile.kv_end - tile.kv_begin - 1) / chunk_kv + 1;
  const int32_t with_spare = planned + (p.mask.window_left >= 0 ? 1 : 0);
  const int32_t states_before = (tile.partial_row - merge.first_partial_row) / p.schedule.tile_q;
  const int32_t left = merge.num_states - states_before;  // the merge's states from this tile on
  return with_spare == left ? with_spare : planned;
}

}  // namespace flashplan
