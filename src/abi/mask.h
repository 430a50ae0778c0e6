// SPDX-License-Identifier: Apache-2.0
// Which keys a query sees. The planner, the CPU kernel and the GPU kernels all use this code.
#pragma once

#include <cstdint>

#include "abi/host_device.h"

namespace flashplan {

/// The caller's mask of bits: a row for each token of q, and in it a bit for each key from
/// mask_begin (flashplan/plan.h) on.
struct MaskBits {
  bool is_given = false;
  int32_t num_words = 0;            // number of words in a row
  const uint32_t* words = nullptr;  // each holds the bits of 32 keys
  int64_t row_stride = 0;           // in words

  /// Bit j says whether token `token` of q sees key mask_begin + first + j. Keys before mask_begin
  /// are seen, keys without a bit are not.
  FLASHPLAN_HOST_DEVICE uint32_t seen(int64_t token, int32_t first) const {
    const int32_t i = first >> 5;  // rounded down
    const int shift = first & 31;
    const uint32_t low = word(token, i) >> shift;
    return shift == 0 ? low : low | word(token, i + 1) << (32 - shift);
  }

 private:
  FLASHPLAN_HOST_DEVICE uint32_t word(int64_t token, int32_t i) const {
    if (i < 0) return 0xffffffffU;
    return i < num_words ? words[token * row_stride + i] : 0;
  }
};

/// Keys [begin, end); none where end <= begin.
struct KeySpan {
  int32_t begin;
  int32_t end;
};

/// The causal mask and the sliding window. A query has a position among the keys: query i of a
/// request stands at kv_len - qo_len + i, so that the last query stands at the last key.
struct Mask {
  bool causal = false;       // keys after the query's position are hidden
  int32_t window_left = -1;  // keys more than window_left before the position are hidden; -1: none

  /// The keys among `keys` that the query at `position` sees. Neither begin nor end gets smaller
  /// for a later query. So the keys that any row of a tile sees go from the first key that its
  /// first row sees to the last key that its last row sees.
  FLASHPLAN_HOST_DEVICE KeySpan visible(int32_t position, KeySpan keys) const {
    const int32_t causal_end = position + 1;
    if (causal && causal_end < keys.end) keys.end = causal_end;
    // position - window_left is computed only where it is positive, so it can not overflow.
    if (window_left >= 0 && window_left < position) {
      const int32_t window_begin = position - window_left;
      if (window_begin > keys.begin) keys.begin = window_begin;
    }
    return keys;
  }

  /// The keys of a request that at least one of queries `first` to `last` sees. The first key is
  /// rounded down to a multiple of `tile_kv`. {0, 0}: there are none. `position`: the position of
  /// query 0.
  FLASHPLAN_HOST_DEVICE KeySpan visible_to_queries(int32_t first, int32_t last, int32_t position,
                                                   int32_t kv_len, int32_t tile_kv) const {
    const KeySpan all = {0, kv_len};
    const int32_t begin = visible(position + first, all).begin / tile_kv * tile_kv;
    const int32_t end = visible(position + last, all).end;
    return begin < end ? KeySpan{begin, end} : KeySpan{0, 0};
  }
};

}  // namespace flashplan
