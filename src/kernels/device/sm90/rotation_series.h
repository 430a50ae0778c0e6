// SPDX-License-Identifier: Apache-2.0
// Rotates rows (RoPE) whose positions are evenly spaced. A thread rotates the same four pairs of
// dims in several of these rows.
#pragma once

#include "kernels/device/rotation.h"

namespace flashplan::device {

/// The place of four pairs of dims of a row in a tile, as offsets from the start of the tile. They
/// are 8 neighbouring dims if pairs are interleaved, otherwise 4 dims of each half of the rotated
/// dims.
template <typename Variant, DType kDType, typename Tile>
struct FourPairs {
  static constexpr int kPerRow = Variant::kRotaryDim / 8;
  static constexpr bool kInterleaved = Variant::kInterleaved;

  uint32_t first;
  uint32_t second;

  FourPairs() = default;
  /// Group number `item` of four pairs in row `row`.
  FLASHPLAN_DEVICE FourPairs(int row, int item)
      : first(place(row, kInterleaved ? item * 8 : item * 4)),
        second(place(row, kInterleaved ? item * 8 : item * 4 + Variant::kRotaryDim / 2)) {}

  FLASHPLAN_DEVICE uint4 load(uint32_t tile) const {
    if constexpr (kInterleaved) return load_shared_16(tile + first);
    const uint2 a = load_shared_8(tile + first);
    const uint2 b = load_shared_8(tile + second);
    return {a.x, a.y, b.x, b.y};
  }
  FLASHPLAN_DEVICE void store(uint32_t tile, uint4 words) const {
    if constexpr (kInterleaved) {
      store_shared_16(tile + first, words);
    } else {
      store_shared_8(tile + first, {words.x, words.y});
      store_shared_8(tile + second, {words.z, words.w});
    }
  }
  static FLASHPLAN_DEVICE uint4 rotated(uint4 words, const float2 (&cos_sin)[4]) {
    if constexpr (kInterleaved) {
      rotate_chunk<kDType>(words, [&](int i) { return cos_sin[i]; });
    } else {
      rotate_words<kDType>(words.x, words.z, cos_sin[0], cos_sin[1]);
      rotate_words<kDType>(words.y, words.w, cos_sin[2], cos_sin[3]);
    }
    return words;
  }

 private:
  static FLASHPLAN_DEVICE uint32_t place(int row, int dim) {
    return Tile::offset(row, dim / 8) + static_cast<uint32_t>(dim % 8 * 2);
  }
};

/// {cos, sin} of the angles by which four pairs of dims are rotated, at evenly spaced positions.
/// `item` says which four pairs of a row, as in FourPairs. From the third position on, a cosine or
/// sine is computed from those of the two positions before, by one multiply-add:
///   x[n + 1] = 2 cos(d) x[n] - x[n - 1]
/// where the angle grows by d from one position to the next. The error is at most 4e-5 after 32
/// positions with the cos(d) of Variant::step(), and at most 1.2e-4 after 16 positions with that of
/// rotor(). Rounding to float16 adds up to 4.9e-4.
template <typename Variant>
struct FourTurns {
  float2 now[4];
  float2 next[4];
  float twice_cosine[4];

  /// `step(i)`: {cos, sin} of the angle by which pair i turns from one position to the next.
  template <typename Position, typename Step>
  FLASHPLAN_DEVICE void begin(int item, Position position, Step step) {
    set(item, position);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 by = step(item * 4 + i);
      next[i] = now[i];
      device::rotate(next[i].x, next[i].y, by);
      twice_cosine[i] = 2.0F * by.x;
    }
  }
  /// Sets `now` for one position alone.
  template <typename Position>
  FLASHPLAN_DEVICE void set(int item, Position position) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      now[i] = rotor(angle_of(Variant::turns(item * 4 + i), position), Variant::kGain);
    }
  }
  FLASHPLAN_DEVICE void advance() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 last = now[i];
      now[i] = next[i];
      next[i] = {__fmaf_rn(twice_cosine[i], now[i].x, -last.x),
                 __fmaf_rn(twice_cosine[i], now[i].y, -last.y)};
    }
  }
};

}  // namespace flashplan::device
