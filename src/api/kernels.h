// SPDX-License-Identifier: Apache-2.0
// All compiled kernels, and the one way to run them.
#pragma once

#include <span>

#include "abi/params.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "plan/kernel/kernel.h"

namespace flashplan {

/// The kernels compiled in for a type of device.
std::span<const Kernel> kernels_for(DeviceType device) noexcept;

/// Runs `kernel`. On the CPU it returns when the work is done. On a GPU, which must be the current
/// device, it launches one kernel on `stream` and does not wait.
Status launch(const Kernel& kernel, const AttentionParams& params, Stream stream) noexcept;

}  // namespace flashplan
