// SPDX-License-Identifier: Apache-2.0
// Whole-number division.
#pragma once

#include <bit>
#include <cstdint>

namespace flashplan {

inline int log2_of(int32_t power_of_two) {
  return std::countr_zero(static_cast<uint32_t>(power_of_two));
}

/// value / divisor, rounded up; value >= 0.
inline int32_t ceil_divide(int32_t value, int32_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

/// The same for a divisor of 2^shift.
inline int32_t ceil_shift(int64_t value, int shift) {
  return static_cast<int32_t>((value + (int64_t{1} << shift) - 1) >> shift);
}

}  // namespace flashplan
