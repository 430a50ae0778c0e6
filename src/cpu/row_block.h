// SPDX-License-Identifier: Apache-2.0
// The query rows of a work tile, and the keys that each row sees.
// Only run_queue.h includes this file, inside the namespace of an instruction set.

FLASHPLAN_INLINE int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }

/// The rows of a work tile for num_kv_heads consecutive kv heads. With n = rows.num_rows, row i is
/// row i % n of `rows`, for kv head kv_head + i / n.
struct RowBlock {
  const AttentionParams& params;
  PackedRows rows;
  Segment segment;
  int32_t first_masked_key;
  int32_t kv_head;
  int32_t num_kv_heads;
  int32_t request;

  int32_t num_rows() const { return num_kv_heads * rows.num_rows; }
  int64_t token(int32_t i) const {
    return rows.token(i % rows.num_rows, params.schedule.group_size);
  }
  int32_t kv_head_of(int32_t i) const { return kv_head + i / rows.num_rows; }
  int64_t qo_head(int32_t i) const {
    return rows.qo_head(kv_head_of(i), i % rows.num_rows, params.schedule.group_size);
  }
  /// The position of row i's query among the keys.
  int32_t position(int32_t i) const {
    return segment.position + rows.query(i % rows.num_rows, params.schedule.group_size);
  }
  /// The keys among [kv_begin, kv_begin + num_keys) that row i sees, counted from kv_begin.
  KeySpan visible(int32_t i, int32_t kv_begin, int32_t num_keys) const {
    const KeySpan keys = params.mask.visible(position(i), {kv_begin, kv_begin + num_keys});
    if (keys.begin >= keys.end) return {0, 0};
    return {keys.begin - kv_begin, keys.end - kv_begin};
  }
  /// The position of the logit of row i and key 0, for variants.
  LogitPosition logit_position(int32_t i) const {
    return {request,
            position(i),
            0,
            static_cast<int32_t>(qo_head(i)),
            kv_head_of(i),
            segment.qo_len,
            segment.position + segment.qo_len};
  }
  /// The position of the first element of row i of q and o, for variants.
  ElementPosition element_position(int32_t i) const {
    return {request, position(i), static_cast<int32_t>(qo_head(i)), 0};
  }
  /// One bit for each key of the tile that begins at kv_begin: whether the caller's mask lets row i
  /// see it.
  uint32_t seen(int32_t i, int32_t kv_begin) const {
    return params.tensors.mask.seen(token(i), kv_begin - first_masked_key);
  }
};
static_assert(kCpuTileKv == 32);  // RowBlock::seen() has a bit for each key
