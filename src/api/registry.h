// SPDX-License-Identifier: Apache-2.0
// From the chosen configuration to the function that runs it.
#pragma once

#include <string>

#include "flashplan/status.h"
#include "plan/kernel_config.h"

namespace flashplan {

/// Finds the compiled kernel. `name` lives as long as the library.
///   kUnsupported  not compiled in
Status find_kernel(const KernelConfig& config, LaunchFunction* launch, const char** name) noexcept;

}  // namespace flashplan
