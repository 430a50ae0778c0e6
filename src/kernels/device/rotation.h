// SPDX-License-Identifier: Apache-2.0
// Rotary position embeddings: rotates the rows of a tile in shared memory, in place.
//
// A variant with kRotates has these members, which src/variant/source.cpp writes:
//   kRotaryDim    how many dims of a row, from the first one on, are rotated
//   kInterleaved  pairs are dims (2 i, 2 i + 1) instead of (i, i + kRotaryDim / 2)
//   kGain         multiplies cosines and sines
//   turns(i)      the angle by which pair i turns in one position, in 2^-64 of a turn
//   step(i)       {cos, sin} of the angle by which pair i turns in 8 positions
#pragma once

#include "kernels/device/numeric.h"
#include "kernels/device/variant.h"

namespace flashplan::device {

/// `turns` * `position` in 2^-32 of a turn. Whole turns vanish by overflow, so that no angle is too
/// large to be exact. A signed position may be negative: without a causal mask, a request may have
/// more queries than keys.
template <typename Position>
FLASHPLAN_DEVICE uint32_t angle_of(uint64_t turns, Position position) {
  return static_cast<uint32_t>(turns * static_cast<uint64_t>(position) >> 32);
}

/// `gain` times {cos, sin} of the angle `part`, which is in 2^-32 of a turn.
FLASHPLAN_DEVICE float2 rotor(uint32_t part, float gain) {
  // The upper bits of `part` become the mantissa of a float in [1, 2), which takes no conversion.
  // Less 1.5 turns, the angle is in [-pi, pi), where the fast functions are best. This angle is
  // half a turn off, which changes the signs of both cosine and sine.
  constexpr float kTurn = 6.2831853F;
  const float angle = __fmaf_rn(__uint_as_float(part >> 9 | 0x3f800000U), kTurn, -1.5F * kTurn);
  return {-gain * cos_fast(angle), -gain * sin_fast(angle)};
}

/// Rotates the pair (a, b).
FLASHPLAN_DEVICE void rotate(float& a, float& b, float2 cos_sin) {
  const float first = __fmaf_rn(a, cos_sin.x, -__fmul_rn(b, cos_sin.y));
  b = __fmaf_rn(b, cos_sin.x, __fmul_rn(a, cos_sin.y));
  a = first;
}

template <DType kDType>
FLASHPLAN_DEVICE uint32_t rotated_pair(uint32_t pair, float2 cos_sin) {
  float2 x = Element<kDType>::unpack(pair);
  rotate(x.x, x.y, cos_sin);
  return Element<kDType>::pack(x.x, x.y);
}
/// Rotates two pairs: the low elements of `a` and `b`, and their high elements.
template <DType kDType>
FLASHPLAN_DEVICE void rotate_words(uint32_t& a, uint32_t& b, float2 of_low, float2 of_high) {
  float2 x = Element<kDType>::unpack(a);
  float2 y = Element<kDType>::unpack(b);
  rotate(x.x, y.x, of_low);
  rotate(x.y, y.y, of_high);
  a = Element<kDType>::pack(x.x, x.y);
  b = Element<kDType>::pack(y.x, y.y);
}

/// Rotates 8 neighbouring dims, which are 4 interleaved pairs. `cos_sin(i)` returns the cosine and
/// sine of the angle of pair i.
template <DType kDType, typename CosSin>
FLASHPLAN_DEVICE void rotate_chunk(uint4& a, const CosSin& cos_sin) {
  a = {rotated_pair<kDType>(a.x, cos_sin(0)), rotated_pair<kDType>(a.y, cos_sin(1)),
       rotated_pair<kDType>(a.z, cos_sin(2)), rotated_pair<kDType>(a.w, cos_sin(3))};
}
/// Rotates 8 pairs that are not interleaved: `a` has the first dim of each pair, which is in the
/// first half of the rotated dims, and `b` the second dim, which is in the second half.
template <DType kDType, typename CosSin>
FLASHPLAN_DEVICE void rotate_chunks_of_halves(uint4& a, uint4& b, const CosSin& cos_sin) {
  rotate_words<kDType>(a.x, b.x, cos_sin(0), cos_sin(1));
  rotate_words<kDType>(a.y, b.y, cos_sin(2), cos_sin(3));
  rotate_words<kDType>(a.z, b.z, cos_sin(4), cos_sin(5));
  rotate_words<kDType>(a.w, b.w, cos_sin(6), cos_sin(7));
}

/// Rotates `num_rows` rows of 16-bit elements, from `first_row` of the tile on, by kThreads
/// threads; the caller is number `thread` of them. Tile::offset(row, chunk) is the byte offset of 8
/// dims of a row. `position(row)` is the position of a row of the tile. `hook(x, row, dim)` is
/// called for each element before the rotation, if kHasHook.
template <typename Variant, DType kDType, typename Tile, int kHeadDim, int kThreads, bool kHasHook,
          int kRowsAtOnce = 1>
struct RowRotation {
  static_assert(Element<kDType>::kBytes == 2);
  static constexpr int kPairs = Variant::kRotaryDim / 2;
  static constexpr bool kInterleaved = Variant::kInterleaved;
  /// Whether the rotated dims divide into whole chunks of 8 dims, such that one thread can take
  /// both dims of each pair.
  static constexpr bool kByChunks = !kHasHook && (kInterleaved ? 2 * kPairs : kPairs) % 8 == 0;

  template <typename Position, typename Hook>
  static FLASHPLAN_DEVICE void rotate_rows(uint32_t tile, int first_row, int num_rows, int thread,
                                           Position position, Hook hook) {
    if constexpr (kByChunks) {
      rotate_chunks(tile, first_row, num_rows, thread, position);
    } else {
      rotate_elements(tile, first_row, num_rows, thread, position, hook);
    }
  }

 private:
  /// Rotates whole chunks. A thread takes the same dims of several rows.
  template <typename Position>
  static FLASHPLAN_DEVICE void rotate_chunks(uint32_t tile, int first_row, int num_rows, int thread,
                                             Position position) {
    // A row has kItems items: a chunk of 4 interleaved pairs, or the two chunks that have 8 pairs.
    constexpr int kItems = kInterleaved ? Variant::kRotaryDim / 8 : kPairs / 8;
    constexpr int kPairsOfItem = kInterleaved ? 4 : 8;
    constexpr int kRowStep = kThreads / kItems;
    const int item = thread % kItems;
    if (thread >= kItems * kRowStep) return;
    uint64_t turns[kPairsOfItem];
#pragma unroll
    for (int i = 0; i < kPairsOfItem; ++i) turns[i] = Variant::turns(item * kPairsOfItem + i);
#pragma unroll kRowsAtOnce  // loads of one row overlap with sines of the next
    for (int r = thread / kItems; r < num_rows; r += kRowStep) {
      const int row = first_row + r;
      const auto at = position(row);
      const auto cos_sin = [&](int i) { return rotor(angle_of(turns[i], at), Variant::kGain); };
      const uint32_t first = tile + Tile::offset(row, item);
      uint4 a = load_shared_16(first);
      if constexpr (kInterleaved) {
        rotate_chunk<kDType>(a, cos_sin);
      } else {
        const uint32_t second = tile + Tile::offset(row, item + kItems);
        uint4 b = load_shared_16(second);
        rotate_chunks_of_halves<kDType>(a, b, cos_sin);
        store_shared_16(second, b);
      }
      store_shared_16(first, a);
    }
  }

  /// Rotates element by element, which hooks need, and dims that do not divide into chunks.
  template <typename Position, typename Hook>
  static FLASHPLAN_DEVICE void rotate_elements(uint32_t tile, int first_row, int num_rows,
                                               int thread, Position position, Hook hook) {
    constexpr int kOthers = kHasHook ? kHeadDim - Variant::kRotaryDim : 0;
    constexpr int kItems = kPairs + kOthers;  // items of a row: pairs, then single elements
#pragma unroll 1
    for (int i = thread; i < num_rows * kItems; i += kThreads) {
      const int row = first_row + i / kItems;
      const int item = i % kItems;
      const auto address = [&](int dim) {
        return tile + Tile::offset(row, dim / 8) + static_cast<uint32_t>(dim % 8 * 2);
      };
      const auto load = [&](int dim) {
        const float x = Element<kDType>::unpack(load_shared_2(address(dim))).x;
        return kHasHook ? hook(x, row, dim) : x;
      };
      const auto store = [&](int dim, float x) {
        store_shared_2(address(dim), Element<kDType>::pack(x, 0.0F));
      };
      if (item >= kPairs) {
        const int dim = Variant::kRotaryDim + item - kPairs;
        store(dim, load(dim));
        continue;
      }
      const int first = kInterleaved ? 2 * item : item;
      const int second = kInterleaved ? first + 1 : first + kPairs;
      float a = load(first);
      float b = load(second);
      rotate(a, b, rotor(angle_of(Variant::turns(item), position(row)), Variant::kGain));
      store(first, a);
      store(second, b);
    }
  }
};

}  // namespace flashplan::device
