// SPDX-License-Identifier: Apache-2.0
// Division by what is known before a launch.
#pragma once

#include "abi/params.h"
#include "kernels/device/ptx.h"

namespace flashplan::device {

/// x / divisor.
FLASHPLAN_DEVICE uint32_t quotient(uint32_t x, const Divisor& divisor) {
  return divisor.value == 1 ? x : __umulhi(x, divisor.multiplier) >> divisor.shift;
}

}  // namespace flashplan::device
