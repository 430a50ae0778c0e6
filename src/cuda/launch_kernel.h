// SPDX-License-Identifier: Apache-2.0
// The launch of attention kernels.
#pragma once

#include "abi/params.h"
#include "flashplan/status.h"
#include "plan/kernel.h"

namespace flashplan::cuda {

/// Makes `kernel` ready on the current device: loads it, and allows its shared memory. Once per
/// device before the first launch. `is_compiled_in`: not code that was loaded for this
/// architecture.
///   kUnsupported  CUDA picks code for another architecture, which has another geometry
Status prepare(const Kernel& kernel, bool is_compiled_in) noexcept;

struct LaunchShape {
  int32_t ctas = 0;
  int32_t threads = 0;     // of a CTA
  int32_t smem_bytes = 0;  // dynamic
  bool pdl = false;        // programmatic dependent launch (compute capability 9.0)
};
/// Launches `code`, which takes the struct at `params`, on `stream` of the current device.
Status launch_code(const void* code, const LaunchShape& shape, const void* params,
                   Stream stream) noexcept;

/// Launches `kernel` on `stream` of the current device, with a CTA for each queue of the schedule.
/// No synchronisation.
Status launch(const Kernel& kernel, const AttentionParams& params, Stream stream) noexcept;

}  // namespace flashplan::cuda
