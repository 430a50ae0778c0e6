// SPDX-License-Identifier: Apache-2.0
// The CPU engine: threads of the pool take the queues of a plan and run them.
#pragma once

#include <span>

#include "abi/params.h"
#include "plan/kernel/kernel.h"

namespace flashplan::cpu {

/// The kernels, one for each dtype of k and v, for the widest instruction set of this machine.
std::span<const Kernel> kernels() noexcept;

/// Runs all queues of the schedule; returns when they are done.
void launch(const Kernel& kernel, const AttentionParams& params) noexcept;

}  // namespace flashplan::cpu
