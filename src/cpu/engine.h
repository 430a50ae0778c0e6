// SPDX-License-Identifier: Apache-2.0
// The CPU engine: the queues of a plan, taken by the threads of the pool.
#pragma once

#include <span>

#include "abi/params.h"
#include "plan/kernel.h"

namespace flashplan::cpu {

/// One kernel for each dtype of k and v, in the widest instruction set that this machine has.
std::span<const Kernel> kernels() noexcept;

/// Runs all queues of the schedule; returns when they are done.
void launch(const Kernel& kernel, const AttentionParams& params) noexcept;

}  // namespace flashplan::cpu
