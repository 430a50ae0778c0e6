// SPDX-License-Identifier: Apache-2.0
// Keys of 8 bits as numbers of the dtype of q.
#pragma once

#include "kernels/device/element.h"
#include "kernels/device/ptx.h"

namespace flashplan::device {

/// What rows of kKv look like, and how they become rows of kQ. Rows begin with kContentDims floats
/// of 8 bits. In kFp8DsMla there are scales of 128 of them each behind them, and a tail of
/// bfloat16; in other dtypes the tail has 8 bits, too.
template <DType kQ, DType kKv>
struct MlaWidening {
  static constexpr bool kHasScales = kKv == DType::kFp8DsMla;
  static constexpr DType kContent = kHasScales ? DType::kFloat8E4M3 : kKv;
  static constexpr int kContentDims = 512;
  static constexpr int kDimsOfScale = 128;
  // Where the tail begins, if it is in the same tensor, and its elements.
  static constexpr int kTailOffset = kContentDims + (kHasScales ? kContentDims / 128 * 4 : 0);
  static constexpr int kTailBytes = kHasScales ? 2 : 1;

  /// Whether to_pairs() widens these floats. It takes few instructions, none of them slow, but does
  /// not know NaN.
  static FLASHPLAN_DEVICE bool is_quick(uint4 bytes) {
    if constexpr (kQ != DType::kBFloat16 || kContent != DType::kFloat8E4M3) return false;
    // Bit 7 of a byte becomes 1 where the others are.
    const auto carry = [](uint32_t four) { return (four & 0x7f7f7f7fU) + 0x01010101U; };
    const uint32_t all = carry(bytes.x) | carry(bytes.y) | carry(bytes.z) | carry(bytes.w);
    return (all & 0x80808080U) == 0;
  }
  /// What pairs are multiplied with: the scale as the sum of two bfloat16, each twice.
  struct PairScale {
    uint32_t high;
    uint32_t low;
  };
  static FLASHPLAN_DEVICE PairScale pair_scale(float scale) {
    const uint32_t high = Element<DType::kBFloat16>::pack(scale, scale);
    const float rest = scale - Element<DType::kBFloat16>::unpack(high).x;
    const bool is_finite = rest - rest == 0.0F;
    return {high, is_finite ? Element<DType::kBFloat16>::pack(rest, rest) : 0U};
  }
  /// Four floats of e4m3 as bfloat16. The fields of their exponents and mantissas, moved to those
  /// of bfloat16, are the floats times 2^-120, subnormal ones too. Without scales the pairs are
  /// those of content(); with scales, one in a thousand has another last bit, since a product lay
  /// in the middle of two bfloat16.
  static FLASHPLAN_DEVICE uint2 to_pairs(uint32_t four, PairScale scale) {
    return {to_pair(__byte_perm(four, 0, 0x1404), scale),
            to_pair(__byte_perm(four, 0, 0x3424), scale)};
  }

  /// Four floats of 8 bits. The product with the scale is rounded to float32, and then to kQ.
  static FLASHPLAN_DEVICE uint2 content(uint32_t four, float scale) {
    const uint2 pairs = Element<kContent>::widen(four);
    if constexpr (!kHasScales && kQ == DType::kFloat16) return pairs;
    return {scaled(pairs.x, scale), scaled(pairs.y, scale)};
  }
  /// A pair of the tail, where it has 16 bits.
  static FLASHPLAN_DEVICE uint32_t tail(uint32_t pair) {
    if constexpr (kQ == DType::kBFloat16) return pair;
    const float2 x = Element<DType::kBFloat16>::unpack(pair);
    return Element<kQ>::pack(x.x, x.y);
  }

 private:
  /// `bytes`: in the upper bytes of the pair; the others are 0.
  static FLASHPLAN_DEVICE uint32_t to_pair(uint32_t bytes, PairScale scale) {
    constexpr uint32_t kTwoTo120 = 0x7b807b80;
    const uint32_t moved = (bytes >> 4 & 0x07f007f0U) | (bytes & 0x80008000U);
    const uint32_t pair = multiply_bf16(moved, kTwoTo120);
    if constexpr (!kHasScales) return pair;
    return multiply_add_bf16(pair, scale.high, multiply_bf16(pair, scale.low));
  }
  static FLASHPLAN_DEVICE uint32_t scaled(uint32_t pair, float scale) {
    const float2 x = Element<DType::kFloat16>::unpack(pair);
    if constexpr (!kHasScales) return Element<kQ>::pack(x.x, x.y);
    return Element<kQ>::pack(x.x * scale, x.y * scale);
  }
};

}  // namespace flashplan::device
