// SPDX-License-Identifier: Apache-2.0
// The only place that chooses: "can you?", "how much workspace?" and "which kernel?" all ask here.
#pragma once

#include <cstdint>
#include <span>

#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "plan/kernel_config.h"

namespace flashplan {

/// What the choice depends on besides the options.
struct DeviceLimits {
  int32_t num_processors = 1;  // CPUs this process may run on

  // CUDA: what was compiled in, and the device that the options name.
  std::span<const KernelInstance> instances = {};
  const char* architectures = "";  // they were compiled for, as "80;90a"
  int32_t num_gpus = 0;
  int32_t num_sms = 0;
  int32_t major = 0;  // compute capability
  int32_t minor = 0;
};

/// Checks `options`, and chooses the kernel, its tiles and its number of work queues. Pure.
///   kInvalidArgument  an option is out of range
///   kUnsupported      no kernel; the message says what there is
Status select_kernel(const AttentionOptions& options, const DeviceLimits& device,
                     KernelConfig* config) noexcept;

}  // namespace flashplan
