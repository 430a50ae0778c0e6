// SPDX-License-Identifier: Apache-2.0
// The families of GPU kernels, as values. Their geometry is in <family>.h, their costs are in
// plan/tuning.cpp.
#pragma once

#include "plan/kernel.h"

namespace flashplan {

/// mma.sync, ldmatrix and cp.async, which every GPU from compute capability 8.0 on has.
inline constexpr KernelFamily kSm80Family = {.name = "sm80",
                                             .device = DeviceType::kCuda,
                                             .preference = 0,
                                             .first_unserved = first_unserved_axis,
                                             .scratch_bytes = merged_state_bytes};

}  // namespace flashplan
