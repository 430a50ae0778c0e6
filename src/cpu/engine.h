// SPDX-License-Identifier: Apache-2.0
// The CPU engine: the queues of a plan, taken by the threads of the pool.
#pragma once

#include "plan/kernel_config.h"

namespace flashplan::cpu {

/// The kernel for a configuration of family kCpu, in the widest instruction set this machine has.
Status find_kernel(const KernelConfig& config, LaunchFunction* launch, const char** name) noexcept;

/// "cpu_avx512": the kernels that find_kernel() gives.
const char* kernel_set_name() noexcept;

}  // namespace flashplan::cpu
