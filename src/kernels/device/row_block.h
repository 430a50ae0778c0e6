// SPDX-License-Identifier: Apache-2.0
// The query rows of a work tile, and what each of them sees.
#pragma once

#include "kernels/device/ptx.h"
#include "run/params.h"

namespace flashplan::device {

/// Keys [begin, end) of a request.
struct KeySpan {
  int32_t begin;
  int32_t end;
};

/// Rows of a work tile. Row r is packed row row_begin + r of the request: query token packed /
/// group_size, and query head packed % group_size of the kv head's group (FlashInfer, Appendix A).
struct RowBlock {
  RequestInfo request;
  int32_t request_index;
  int32_t row_begin;
  int32_t num_rows;
  KeySpan keys;  // of the work tile
  int32_t group_size;
  int32_t window_left;  // -1: unbounded
  bool causal;

  FLASHPLAN_DEVICE void assign(const AttentionParams& p, const WorkTile& tile,
                               const RequestInfo& info) {
    request = info;
    request_index = tile.request;
    row_begin = tile.row_tile * p.tile_q;
    num_rows = min(p.tile_q, request.qo_len * p.group_size - row_begin);
    keys = {tile.kv_begin, tile.kv_end};
    group_size = p.group_size;
    window_left = p.window_left;
    causal = p.causal;
  }

  FLASHPLAN_DEVICE int32_t query(int32_t row) const {
    return static_cast<int32_t>(static_cast<uint32_t>(row_begin + row) /
                                static_cast<uint32_t>(group_size));
  }
  FLASHPLAN_DEVICE int64_t token(int32_t row) const {
    return int64_t{request.qo_begin} + query(row);
  }
  FLASHPLAN_DEVICE int32_t head_in_group(int32_t row) const {
    return row_begin + row - query(row) * group_size;
  }

  /// Keys of the tile that a row sees; rows of padding see none.
  FLASHPLAN_DEVICE KeySpan visible(int32_t row) const {
    if (row >= num_rows) return {0, 0};
    const int32_t position = request.kv_len - request.qo_len + query(row);
    KeySpan span = keys;
    if (causal) span.end = min(span.end, position + 1);
    if (window_left >= 0 && window_left < position) {
      span.begin = max(span.begin, position - window_left);
    }
    return span;
  }
  /// Keys that all rows see; may be empty, with end < begin.
  FLASHPLAN_DEVICE KeySpan visible_to_all() const {
    return {visible(num_rows - 1).begin, visible(0).end};
  }
};

}  // namespace flashplan::device
