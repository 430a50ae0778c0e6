// SPDX-License-Identifier: Apache-2.0
// How keys of 8 bits become numbers of the dtype of q.
#pragma once

#include "kernels/device/element.h"

namespace flashplan::device {

/// What rows of kKv look like, and how they become rows of kQ. Rows begin with kContentDims floats
/// of 8 bits. In kFp8DsMla a float32 scale for each 128 of them follows, and a tail of bfloat16; in
/// other dtypes the tail has 8 bits, too.
template <DType kQ, DType kKv>
struct MlaWidening {
  static constexpr bool kHasScales = kKv == DType::kFp8DsMla;
  static constexpr DType kContent = kHasScales ? DType::kFloat8E4M3 : kKv;
  static constexpr int kContentDims = 512;
  static constexpr int kDimsOfScale = 128;
  // In bytes: where the tail begins, if it is in the same tensor, and the size of its elements.
  static constexpr int kTailOffset = kContentDims + (kHasScales ? kContentDims / 128 * 4 : 0);
  static constexpr int kTailBytes = kHasScales ? 2 : 1;

  /// Widens four floats of 8 bits. The product with the scale is rounded to float32, and then to
  /// kQ.
  static FLASHPLAN_DEVICE uint2 content(uint32_t four, float scale) {
    const uint2 pairs = Element<kContent>::widen(four);
    if constexpr (!kHasScales && kQ == DType::kFloat16) return pairs;
    return {scaled(pairs.x, scale), scaled(pairs.y, scale)};
  }
  /// Two elements of a tail of bfloat16, in the dtype of q.
  static FLASHPLAN_DEVICE uint32_t tail(uint32_t pair) {
    if constexpr (kQ == DType::kBFloat16) return pair;
    const float2 x = Element<DType::kBFloat16>::unpack(pair);
    return Element<kQ>::pack(x.x, x.y);
  }

 private:
  static FLASHPLAN_DEVICE uint32_t scaled(uint32_t pair, float scale) {
    const float2 x = Element<DType::kFloat16>::unpack(pair);
    if constexpr (!kHasScales) return Element<kQ>::pack(x.x, x.y);
    return Element<kQ>::pack(x.x * scale, x.y * scale);
  }
};

}  // namespace flashplan::device
