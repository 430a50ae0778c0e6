// SPDX-License-Identifier: Apache-2.0
// Division by powers of two.
#pragma once

#include <bit>
#include <cstdint>

namespace flashplan {

inline int log2_of(int32_t power_of_two) {
  return std::countr_zero(static_cast<uint32_t>(power_of_two));
}

inline int32_t ceil_shift(int64_t value, int shift) {
  return static_cast<int32_t>((value + (int64_t{1} << shift) - 1) >> shift);
}

}  // namespace flashplan
