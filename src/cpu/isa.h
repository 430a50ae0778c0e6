// SPDX-License-Identifier: Apache-2.0
// The instruction set that the CPU kernels use: each of them is compiled once for each set.
#pragma once

namespace flashplan::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512 };

/// The widest set that this build and this machine have, and none wider than the environment
/// variable FLASHPLAN_MAX_CPU_ISA names ("avx2" or "baseline"), which is for tests.
Isa widest_isa() noexcept;

}  // namespace flashplan::cpu
