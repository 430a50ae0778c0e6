// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "flashplan/plan.h"
#include "flashplan/status.h"

namespace flashplan {

constexpr int32_t kMaxCtas = 4096;

/// Checks the options by themselves: not whether a kernel or a device for them exists.
///   kInvalidArgument  an option is out of range
///   kUnsupported      a dtype that no kernel has
Status check_options(const AttentionOptions& options) noexcept;

}  // namespace flashplan
