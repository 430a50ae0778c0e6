// SPDX-License-Identifier: Apache-2.0
// The query rows of a work tile, and the keys that each row sees.
#pragma once

#include "abi/real_lens.h"
#include "kernels/device/variant.h"

namespace flashplan::device {

/// The rows of a work tile and their keys.
struct RowBlock {
  PackedRows rows;
  int32_t kv_row;    // the segment's row of the page table, or its first row of ragged k and v
  int32_t position;  // where the segment's first query stands among the keys
  KeySpan keys;      // keys.begin is rounded down, so the first keys may be hidden from all rows

  /// The last key of the request. Only hooks of variants call this, because it reads global memory.
  FLASHPLAN_DEVICE int32_t last_key(const AttentionParams& p) const {
    return position + p.schedule.segments[rows.segment].qo_len - 1;
  }
  /// The position of the logit of a row and key 0. A row of padding gets the position of the last
  /// row. `qo_len` is that of the segment. Plans of variants share no prefixes, so a segment is a
  /// request.
  FLASHPLAN_DEVICE LogitPosition logit_position(const AttentionParams& p, int32_t row,
                                                int32_t kv_head, int32_t qo_len) const {
    const Divisor& group_size = p.schedule.group_size;
    const int32_t r = min(row, rows.num_rows - 1);
    return {rows.segment,
            position + rows.query(r, group_size),
            0,
            rows.qo_head(kv_head, r, group_size),
            kv_head,
            qo_len,
            position + qo_len};
  }
  /// Keys of the tile that a row sees; rows of padding see none.
  FLASHPLAN_DEVICE KeySpan visible(const AttentionParams& p, int32_t row) const {
    return row < rows.num_rows ? visible_to(p, row) : KeySpan{0, 0};
  }
  /// Keys of the tile that a row sees. The row must not be padding.
  FLASHPLAN_DEVICE KeySpan visible_to(const AttentionParams& p, int32_t row) const {
    return p.mask.visible(position + rows.query(row, p.schedule.group_size), keys);
  }
  /// The first key that any row sees; a window hides the keys before it from all rows.
  FLASHPLAN_DEVICE int32_t first_seen(const AttentionParams& p) const {
    return p.mask.window_left < 0 ? keys.begin : visible_to(p, 0).begin;
  }
};

/// The position of an element of q or o, in rows whose segment has its first query at `position`. A
/// row of padding gets the position of the last row.
FLASHPLAN_DEVICE ElementPosition element_position(const AttentionParams& p, const PackedRows& rows,
                                                  int32_t position, int32_t kv_head, int32_t row,
                                                  int32_t dim) {
  const Divisor& group_size = p.schedule.group_size;
  const int32_t r = min(row, rows.num_rows - 1);
  return {rows.segment, position + rows.query(r, group_size), rows.qo_head(kv_head, r, group_size),
          dim};
}

/// The position of the first query of the segment of `rows`. For callers that have no work tile,
/// such as merges.
FLASHPLAN_DEVICE int32_t first_position(const AttentionParams& p, const PackedRows& rows) {
  const Segment& segment = p.schedule.segments[rows.segment];
  return real_length(p, segment, rows.segment) - segment.qo_len;
}

/// The keys of a work tile that the rows of a warp see.
struct VisibleKeys {
  static constexpr int kAnyEnd = sizeof(int32_t);  // offset of to_any.end

  KeySpan to_any;  // seen by at least one row
  KeySpan to_all;  // seen by every row; may be empty, with end < begin

  /// `to_any` and `to_all` of rows [first, last]. Later rows see later keys.
  FLASHPLAN_DEVICE VisibleKeys(const AttentionParams& p, const RowBlock& block, int first,
                               int last) {
    const KeySpan of_first = block.visible(p, first);
    const KeySpan of_last = block.visible(p, last);
    to_any = {of_first.begin, of_last.end};
    to_all = {of_last.begin, of_first.end};
  }
};

}  // namespace flashplan::device
