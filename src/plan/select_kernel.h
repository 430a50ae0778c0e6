// SPDX-License-Identifier: Apache-2.0
// The only place that chooses: "can you?", "how much workspace?" and "which kernel?" all ask here.
#pragma once

#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "plan/kernel_config.h"

namespace flashplan {

/// What the choice depends on besides the options.
struct DeviceLimits {
  int32_t num_processors = 1;  // CPUs this process may run on
};

/// Checks `options`, and chooses the kernel, its tiles and its number of work queues. Pure.
///   kInvalidArgument, kInvalidType  an option is out of range
///   kUnsupported                    no kernel; the message says what there is
Status select_kernel(const AttentionOptions& options, const DeviceLimits& device,
                     KernelConfig* config) noexcept;

}  // namespace flashplan
