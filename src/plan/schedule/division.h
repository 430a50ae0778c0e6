// SPDX-License-Identifier: Apache-2.0
// Whole-number division.
#pragma once

#include <bit>
#include <cstdint>

#include "abi/divisor.h"

namespace flashplan {

inline int log2_of(int32_t power_of_two) {
  return std::countr_zero(static_cast<uint32_t>(power_of_two));
}

/// value / divisor, rounded up; value >= 0.
inline int32_t ceil_divide(int32_t value, int32_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

/// value / divisor, rounded up, by a multiplication, which takes less time than a division.
inline int32_t ceil_divide(int32_t value, const Divisor& divisor) {
  if (value == 0 || divisor.value == 1) return value;
  const uint64_t product = static_cast<uint64_t>(value - 1) * divisor.multiplier;
  return static_cast<int32_t>(product >> (32 + divisor.shift)) + 1;
}

/// value / divisor, rounded down, for positive numbers. Most fit into 32 bits, where a division
/// takes less time.
inline int64_t divide(int64_t value, int64_t divisor) {
  if ((value | divisor) > UINT32_MAX) return value / divisor;
  return static_cast<uint32_t>(value) / static_cast<uint32_t>(divisor);
}

/// value / 2^shift, rounded up.
inline int32_t ceil_shift(int64_t value, int shift) {
  return static_cast<int32_t>((value + (int64_t{1} << shift) - 1) >> shift);
}

}  // namespace flashplan
