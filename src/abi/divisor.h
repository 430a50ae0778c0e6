// SPDX-License-Identifier: Apache-2.0
// Division by a number that is known when a plan is made, not when the kernels are compiled.
#pragma once

#include <cstdint>

#include "abi/host_device.h"

namespace flashplan {

/// x / value == x * multiplier >> (32 + shift) for x in [0, 2^31), if value > 1 (Granlund and
/// Montgomery). A multiplication replaces the division, which takes a GPU about 20 instructions.
struct Divisor {
  int32_t value = 0;
  uint32_t multiplier = 0;
  int32_t shift = 0;
};

constexpr Divisor make_divisor(int32_t value) {
  int bits = 0;  // log2(value), rounded up
  while (bits < 31 && int64_t{1} << bits < value) ++bits;
  if (bits == 0) return {value, 0, 0};
  const auto divisor = static_cast<uint64_t>(value);
  const uint64_t multiplier = ((uint64_t{1} << (31 + bits)) + divisor - 1) / divisor;
  return {value, static_cast<uint32_t>(multiplier), bits - 1};
}

/// x / divisor, rounded down, for x < 2^31.
FLASHPLAN_HOST_DEVICE uint32_t quotient(uint32_t x, const Divisor& divisor) {
#ifdef __CUDA_ARCH__
  return divisor.value == 1 ? x : __umulhi(x, divisor.multiplier) >> divisor.shift;
#else
  return x / static_cast<uint32_t>(divisor.value);
#endif
}

}  // namespace flashplan
