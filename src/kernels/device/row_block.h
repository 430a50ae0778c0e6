// SPDX-License-Identifier: Apache-2.0
// The query rows of a work tile, and what each of them sees.
#pragma once

#include "kernels/device/divisor.h"
#include "kernels/device/variant.h"

namespace flashplan::device {

/// Rows of a work tile. Row r is packed row row_begin + r of the request: query token packed /
/// group_size, and query head packed % group_size of the kv head's group (FlashInfer, Appendix A).
struct RowBlock {
  RequestInfo request;
  int32_t request_index;
  int32_t row_begin;
  int32_t num_rows;
  KeySpan keys;  // of the work tile

  FLASHPLAN_DEVICE void assign(const AttentionParams& p, const WorkTile& tile,
                               const RequestInfo& info) {
    request = info;
    request_index = tile.request;
    row_begin = tile.row_tile * p.schedule.tile_q;
    num_rows = min(p.schedule.tile_q, request.qo_len * p.schedule.group_size.value - row_begin);
    keys = {tile.kv_begin, tile.kv_end};
  }

  FLASHPLAN_DEVICE int32_t query(const AttentionParams& p, int32_t row) const {
    return static_cast<int32_t>(
        quotient(static_cast<uint32_t>(row_begin + row), p.schedule.group_size));
  }
  /// Unsigned, as what is multiplied with a stride should be: that is 2 instructions instead of 4.
  FLASHPLAN_DEVICE uint32_t token(const AttentionParams& p, int32_t row) const {
    return static_cast<uint32_t>(request.qo_begin + query(p, row));
  }
  FLASHPLAN_DEVICE int32_t qo_head(const AttentionParams& p, int32_t kv_head, int32_t row) const {
    return (kv_head - query(p, row)) * p.schedule.group_size.value + row_begin + row;
  }

  /// Of q and o.
  FLASHPLAN_DEVICE ElementPosition position(const AttentionParams& p, int32_t kv_head, int32_t row,
                                            int32_t dim) const {
    return {request_index, query(p, row), qo_head(p, kv_head, row), dim};
  }

  /// Keys of the tile that a row sees; rows of padding see none.
  FLASHPLAN_DEVICE KeySpan visible(const AttentionParams& p, int32_t row) const {
    return row < num_rows ? visible_to(p, row) : KeySpan{0, 0};
  }
  /// The same of a row of the tile.
  FLASHPLAN_DEVICE KeySpan visible_to(const AttentionParams& p, int32_t row) const {
    const int32_t position = request.kv_len - request.qo_len + query(p, row);
    return p.mask.visible(position, keys);
  }
};

/// What the rows of a warp see of a work tile.
struct VisibleKeys {
  KeySpan to_any;
  KeySpan to_all;  // may be empty, with end < begin

  /// Of rows [first, last]: later rows see later keys.
  FLASHPLAN_DEVICE VisibleKeys(const AttentionParams& p, const RowBlock& rows, int first,
                               int last) {
    const KeySpan of_first = rows.visible(p, first);
    const KeySpan of_last = rows.visible(p, last);
    to_any = {of_first.begin, of_last.end};
    to_all = {of_last.begin, of_first.end};
  }
};

}  // namespace flashplan::device
