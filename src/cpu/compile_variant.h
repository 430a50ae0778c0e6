// SPDX-License-Identifier: Apache-2.0
// Users' variants on the CPU: compiled by the machine's C++ compiler.
#pragma once

#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "plan/kernel/kernel.h"

namespace flashplan::cpu {

/// Whether there is a compiler: kUnsupported says how to get one.
Status find_compiler() noexcept;

/// Gives `kernel`, which was selected for the options, the code of their variant. The code comes
/// from an earlier call of this process, from the cache on disk, or from the compiler, and stays
/// loaded until the process ends.
///   kInvalidArgument  the variant does not compile; Variant::compile_log() has the compiler's text
///   kUnsupported      there is no compiler
Status compile_variant(const AttentionOptions& options, Kernel* kernel) noexcept;

}  // namespace flashplan::cpu
