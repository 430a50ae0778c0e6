// SPDX-License-Identifier: Apache-2.0
// The arithmetic of one tile: logits, online softmax, values. The result of a row depends only on
// its own query and keys, never on the number of rows in the tile. Only run_queue.h includes this
// file, inside the namespace of an instruction set.

/// Computes logits[r][j] = q[r] . k[j] for kRows rows and kKeys keys, with kRows * kKeys = kLanes.
template <int kRows>
FLASHPLAN_INLINE void dot_block(const float* q, const float* k, int32_t width, float* logits,
                                int32_t logits_stride) {
  constexpr int kKeys = kLanes / kRows;
  Vec acc[kLanes] = {};
  for (int32_t d = 0; d < width; d += kLanes) {
    Vec key[kKeys];
    for (int j = 0; j < kKeys; ++j) key[j] = load(k + j * width + d);
    for (int r = 0; r < kRows; ++r) {
      const Vec query = load(q + r * width + d);
      for (int j = 0; j < kKeys; ++j) acc[r * kKeys + j] += query * key[j];
    }
  }
  const Vec sums = sum_lanes(acc);
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kKeys; ++j) logits[r * logits_stride + j] = sums[r * kKeys + j];
  }
}

template <int kRows>
FLASHPLAN_INLINE void dot_rows(const float* q, const float* k, int32_t num_keys, int32_t width,
                               float* logits, int32_t logits_stride) {
  constexpr int kKeys = kLanes / kRows;
  for (int32_t j = 0; j < num_keys; j += kKeys) {
    dot_block<kRows>(q, k + int64_t{j} * width, width, logits + j, logits_stride);
  }
}

/// Computes logits[r][j] = q[r] . k[j]. q: [num_rows, width], k: [num_keys rounded up to kLanes,
/// width], logits: [num_rows, logits_stride].
inline void compute_logits(const float* q, int32_t num_rows, const float* k, int32_t num_keys,
                           int32_t width, float* logits, int32_t logits_stride) {
  constexpr int kMostRows = 4;
  int32_t r = 0;
  const auto at = [&](int32_t row) { return q + int64_t{row} * width; };
  const auto to = [&](int32_t row) { return logits + int64_t{row} * logits_stride; };
  for (; r + kMostRows <= num_rows; r += kMostRows) {
    dot_rows<kMostRows>(at(r), k, num_keys, width, to(r), logits_stride);
  }
  for (; r + 2 <= num_rows; r += 2) {
    dot_rows<2>(at(r), k, num_keys, width, to(r), logits_stride);
  }
  if (r < num_rows) dot_rows<1>(at(r), k, num_keys, width, to(r), logits_stride);
}

constexpr uint32_t kAllSeen = 0xffffffffU;

/// Bits [begin, end) of a word.
FLASHPLAN_INLINE uint32_t bits_of(KeySpan span) {
  if (span.begin >= span.end) return 0;
  return kAllSeen >> (32 - (span.end - span.begin)) << span.begin;
}

/// One step of the online softmax of a row. Logits become probabilities relative to the new
/// maximum, and 0 for keys that are not visible: those outside `visible` or without a bit in
/// `seen`. If `visible` is empty, logits are left as they are. Returns the factor by which the
/// row's o, a sum over earlier keys, must be multiplied. A visible logit of NaN or +inf makes
/// row_sum NaN; the maximum ignores NaN.
inline float softmax_row(float* logits, int32_t num_keys, KeySpan visible, uint32_t seen,
                         float softcap, float* row_max, float* row_sum) {
  if (visible.begin >= visible.end) return 1.0F;
  const float minus_infinity = -__builtin_inff();
  const int32_t padded_keys = (num_keys + kLanes - 1) / kLanes * kLanes;
  if (softcap > 0.0F) {
    for (int32_t j = 0; j < padded_keys; j += kLanes) {
      store(logits + j, soft_cap(load(logits + j), softcap));
    }
  }
  for (int32_t j = 0; j < visible.begin; ++j) logits[j] = minus_infinity;
  for (int32_t j = visible.end; j < padded_keys; ++j) logits[j] = minus_infinity;
  if (seen != kAllSeen) {
    for (int32_t j = visible.begin; j < visible.end; ++j) {
      if ((seen >> j & 1) == 0) logits[j] = minus_infinity;
    }
  }

  Vec largest = splat(*row_max);
  for (int32_t j = 0; j < padded_keys; j += kLanes) largest = max(load(logits + j), largest);
  const float new_max = max_lane(largest);
  // If all logits so far are -inf or NaN, there is no finite maximum to subtract. With a shift of 0
  // the probability of -inf is 0, and that of NaN is NaN, as they should be.
  const float shift = new_max == minus_infinity ? 0.0F : new_max;
  const float shrink = exp(splat(*row_max - shift))[0];
  Vec total = load(row_sum) * shrink;
  for (int32_t j = 0; j < padded_keys; j += kLanes) {
    const Vec p = exp(load(logits + j) - shift);
    store(logits + j, p);
    total += p;
  }
  store(row_sum, total);
  *row_max = new_max;
  return shrink;
}

/// Turns logits of -inf into 0, for variants without a softmax, whose logits are the weights.
inline void drop_infinite(float* logits, KeySpan visible) {
  for (int32_t j = visible.begin; j < visible.end; ++j) {
    if (logits[j] == -__builtin_inff()) logits[j] = 0.0F;
  }
}

/// Adds to o[r] the sum over j in `keys` of p[r][j] * v[j], for kRows rows and kVecs vectors of
/// dims. `v_width`: floats from one value to the next, at least `width`.
template <int kRows, int kVecs>
FLASHPLAN_INLINE void add_values_block(const float* p, int32_t p_stride, const float* v,
                                       int32_t v_width, KeySpan keys, int32_t width, float* o) {
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) acc[r][i] = load(o + r * width + i * kLanes);
  }
  for (int32_t j = keys.begin; j < keys.end; ++j) {
    Vec value[kVecs];
    for (int i = 0; i < kVecs; ++i) value[i] = load(v + int64_t{j} * v_width + i * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const float probability = p[r * p_stride + j];
      for (int i = 0; i < kVecs; ++i) acc[r][i] += probability * value[i];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) store(o + r * width + i * kLanes, acc[r][i]);
  }
}

template <int kRows>
FLASHPLAN_INLINE void add_values_rows(const float* p, int32_t p_stride, const float* v,
                                      int32_t v_width, KeySpan keys, int32_t width, float* o) {
  if (keys.begin >= keys.end) return;
  constexpr int kVecs = kLanes == 16 ? 4 : 2;  // kRows * kVecs accumulators stay in registers
  int32_t d = 0;
  for (; d + kVecs * kLanes <= width; d += kVecs * kLanes) {
    add_values_block<kRows, kVecs>(p, p_stride, v + d, v_width, keys, width, o + d);
  }
  for (; d < width; d += kLanes) {
    add_values_block<kRows, 1>(p, p_stride, v + d, v_width, keys, width, o + d);
  }
}

/// Adds to o[r] the values of row r's visible keys, weighted by p[r], for all rows. Values that are
/// not visible are never read, so they may be NaN.
inline void add_values(const float* p, int32_t p_stride, const KeySpan* visible, int32_t num_rows,
                       const float* v, int32_t v_width, int32_t width, float* o) {
  constexpr int kMostRows = 4;
  int32_t r = 0;
  const auto row = [&](int32_t i, KeySpan keys) {
    add_values_rows<1>(p + int64_t{i} * p_stride, p_stride, v, v_width, keys, width,
                       o + int64_t{i} * width);
  };
  for (; r + kMostRows <= num_rows; r += kMostRows) {
    KeySpan shared = visible[r];
    for (int32_t i = r + 1; i < r + kMostRows; ++i) {
      shared.begin = visible[i].begin > shared.begin ? visible[i].begin : shared.begin;
      shared.end = visible[i].end < shared.end ? visible[i].end : shared.end;
    }
    if (shared.begin >= shared.end) {
      for (int32_t i = r; i < r + kMostRows; ++i) row(i, visible[i]);
      continue;
    }
    // Each row takes its keys in ascending order: the keys before those that all rows see, the keys
    // that all rows see, and the keys after them.
    for (int32_t i = r; i < r + kMostRows; ++i) row(i, {visible[i].begin, shared.begin});
    add_values_rows<kMostRows>(p + int64_t{r} * p_stride, p_stride, v, v_width, shared, width,
                               o + int64_t{r} * width);
    for (int32_t i = r; i < r + kMostRows; ++i) row(i, {shared.end, visible[i].end});
  }
  for (; r < num_rows; ++r) row(r, visible[r]);
}

/// Adds to o[r] the values of the keys whose bits are set in seen[r], weighted by p[r], for all
/// rows.
inline void add_seen_values(const float* p, int32_t p_stride, const uint32_t* seen,
                            int32_t num_rows, const float* v, int32_t v_width, int32_t width,
                            float* o) {
  for (int32_t r = 0; r < num_rows; ++r) {
    // Adds one range of consecutive visible keys at a time.
    int32_t end = 0;
    for (uint32_t left = seen[r]; left != 0; left &= ~bits_of({0, end})) {
      const int32_t begin = __builtin_ctz(left);
      const uint32_t hidden = ~(left | bits_of({0, begin}));
      end = hidden == 0 ? 32 : __builtin_ctz(hidden);
      add_values_rows<1>(p + int64_t{r} * p_stride, p_stride, v, v_width, {begin, end}, width,
                         o + int64_t{r} * width);
    }
  }
}

/// The operator (+) of FlashInfer's paper, section 2.2, on a row: merges the state (o, lse) into
/// (merged_o, merged_max, merged_sum), which is normalised at the end. An lse of NaN or +inf makes
/// the sum NaN, and it stays NaN; the maximum ignores NaN. There is one copy of the code, so that
/// states give the same bits wherever they are merged.
[[gnu::noinline]] void merge_row(const float* o, float lse, int32_t head_dim, float* merged_o,
                                 float* merged_max, float* merged_sum) {
  if (lse == -__builtin_inff()) return;
  const float new_max = lse > *merged_max ? lse : *merged_max;
  const float shrink = exp(splat(*merged_max - new_max))[0];
  const float weight = exp(splat(lse - new_max))[0];
  for (int32_t d = 0; d < head_dim; ++d) merged_o[d] = merged_o[d] * shrink + o[d] * weight;
  *merged_sum = *merged_sum * shrink + weight;
  *merged_max = new_max;
}

/// Adds a row's attention sink to its state. The sink is the logit of one more key, whose value is
/// all zeros. Changes lse, and returns the factor by which o must be multiplied.
inline float add_sink(float sink, float* lse) {
  if (sink == -__builtin_inff()) return 1.0F;
  const float max = sink > *lse ? sink : *lse;
  const float of_keys = exp(splat(*lse - max))[0];
  const float sum = of_keys + exp(splat(sink - max))[0];
  *lse = max + __builtin_logf(sum);
  return of_keys / sum;
}
