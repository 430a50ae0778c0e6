// SPDX-License-Identifier: Apache-2.0
// The instruction set that the CPU kernels use. Each kernel is compiled once for each set.
#pragma once

namespace flashplan::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512 };

/// The widest set that both this build and this machine have. For tests, the environment variable
/// FLASHPLAN_MAX_CPU_ISA ("avx2" or "baseline") names the widest set to use.
Isa widest_isa() noexcept;

}  // namespace flashplan::cpu
