// SPDX-License-Identifier: Apache-2.0
// The only place that chooses kernels: is_supported(), workspace_bytes() and Plan::create() call
// it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "plan/kernel/kernel.h"

namespace flashplan {

/// What the choice depends on besides the options.
struct DeviceLimits {
  std::span<const Kernel> kernels = {};  // those compiled in for the options' type of device
  int32_t num_processors = 1;            // CPUs this process may run on, or SMs of the GPU

  // For GPUs alone:
  std::string_view family = {};  // choose among the kernels of this family; empty: among all
  int32_t num_gpus = 0;
  int32_t major = 0;  // compute capability
  int32_t minor = 0;
};

/// The kernels of a Plan.
struct KernelChoices {
  static constexpr int32_t kMost = 2;

  KernelChoice first;  // for batches of the kind that the bounds are made for
  /// For batches of the other kind, if the bounds allow them and another kernel is faster for them.
  std::optional<KernelChoice> second;
};

/// Checks `options`, and chooses the kernels with their numbers of work queues. The result depends
/// on the arguments alone.
///   kInvalidArgument  an option is out of range
///   kUnsupported      no kernel serves the options; the message lists what the kernels serve
Status select_kernel(const AttentionOptions& options, const DeviceLimits& device,
                     KernelChoices* choices) noexcept;

/// Whether a kernel family serves the options.
struct FamilyAnswer {
  const KernelFamily* family = nullptr;
  Status status;  // kUnsupported: none of its kernels serves the options
};

/// Asks each family that has kernels for the device. Requires options that select_kernel() accepts.
std::vector<FamilyAnswer> ask_families(const AttentionOptions& options, const DeviceLimits& device);

}  // namespace flashplan
