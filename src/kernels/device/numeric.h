// SPDX-License-Identifier: Apache-2.0
// Functions for a few elements of any dtype.
#pragma once

#include "kernels/device/element.h"

namespace flashplan::device {

/// Applies f(element, i) to the elements i = 0 and 1 of a pair.
template <DType kDType, typename Function>
FLASHPLAN_DEVICE uint32_t transformed(uint32_t pair, Function f) {
  const float2 x = Element<kDType>::unpack(pair);
  return Element<kDType>::pack(f(x.x, 0), f(x.y, 1));
}

/// Converts four 8-bit floats to two pairs of `kTo`.
template <DType kFrom, DType kTo>
FLASHPLAN_DEVICE uint2 dequantize(uint32_t four) {
  const uint2 halves = Element<kFrom>::widen(four);
  if constexpr (kTo == DType::kFloat16) {
    return halves;
  } else {
    const float2 low = Element<DType::kFloat16>::unpack(halves.x);
    const float2 high = Element<DType::kFloat16>::unpack(halves.y);
    return {Element<kTo>::pack(low.x, low.y), Element<kTo>::pack(high.x, high.y)};
  }
}

}  // namespace flashplan::device
