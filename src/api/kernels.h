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

/// Runs `kernel`. On the CPU: returns when done. On a GPU, whose device is current: one launch on
/// `stream`, no synchronisation.
Status launch(const Kernel& kernel, const AttentionParams& params, Stream stream) noexcept;

}  // namespace flashplan
