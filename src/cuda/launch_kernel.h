// SPDX-License-Identifier: Apache-2.0
// The launch of attention kernels.
#pragma once

#include "abi/params.h"
#include "flashplan/status.h"
#include "plan/kernel.h"

namespace flashplan::cuda {

/// Makes `kernel` ready on the current device: loads it, and allows its shared memory. Once per
/// device before the first launch.
///   kUnsupported  CUDA takes code for another architecture, of another geometry
Status prepare(const Kernel& kernel) noexcept;

/// One launch of `kernel` on `stream`, of the current device: a CTA for each queue of the schedule.
/// No synchronisation.
Status launch(const Kernel& kernel, const AttentionParams& params, Stream stream) noexcept;

}  // namespace flashplan::cuda
