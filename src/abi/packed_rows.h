// SPDX-License-Identifier: Apache-2.0
// Which rows of q and o a tile covers.
#pragma once

#include <cstdint>

#include "abi/divisor.h"

namespace flashplan {

/// Rows of q and o, for one kv head at a time. Query heads that share a kv head are packed into
/// rows: row r has number p = row_begin + r in its segment, query token p / group_size, and query
/// head p % group_size of the kv head's group (FlashInfer, Appendix A).
struct PackedRows {
  int32_t segment;
  int32_t qo_begin;  // the segment's first token
  int32_t row_begin;
  int32_t num_rows;

  /// The token of a row, counted from the first token of the segment.
  FLASHPLAN_HOST_DEVICE int32_t query(int32_t row, const Divisor& group_size) const {
    return static_cast<int32_t>(quotient(static_cast<uint32_t>(row_begin + row), group_size));
  }
  /// The number that row 0 of this object has in `rows`, which contains all rows of this object and
  /// may belong to another segment, such as a shared prefix.
  FLASHPLAN_HOST_DEVICE int32_t row_in(const PackedRows& rows, const Divisor& group_size) const {
    return (qo_begin - rows.qo_begin) * group_size.value + row_begin - rows.row_begin;
  }
  /// The token of a row: its index in q and o. It is unsigned, because a GPU multiplies an unsigned
  /// number with a 64-bit stride in 2 instructions instead of 4.
  FLASHPLAN_HOST_DEVICE uint32_t token(int32_t row, const Divisor& group_size) const {
    return static_cast<uint32_t>(qo_begin + query(row, group_size));
  }
  /// The query head of a row, for the rows of kv head `kv_head`.
  FLASHPLAN_HOST_DEVICE int32_t qo_head(int32_t kv_head, int32_t row,
                                        const Divisor& group_size) const {
    return (kv_head - query(row, group_size)) * group_size.value + row_begin + row;
  }
};

}  // namespace flashplan
