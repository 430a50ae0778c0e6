// SPDX-License-Identifier: Apache-2.0
// Prepares and launches attention kernels.
#pragma once

#include "abi/params.h"
#include "flashplan/status.h"
#include "plan/kernel/kernel.h"

namespace flashplan::cuda {

/// Makes `kernel` ready on the current device: loads it, and allows its shared memory. Must be
/// called once per device before the first launch. `is_compiled_in`: whether the code is part of
/// the library, and was not compiled at run time for this architecture.
///   kUnsupported  CUDA picks code for another architecture, which has another geometry
Status prepare(const Kernel& kernel, bool is_compiled_in) noexcept;

/// Launches `kernel` on `stream` of the current device, with as many CTAs for each queue of the
/// schedule as the kernel needs. Does not wait for the GPU.
Status launch(const Kernel& kernel, const AttentionParams& params, Stream stream) noexcept;

}  // namespace flashplan::cuda
