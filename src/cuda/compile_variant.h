// SPDX-License-Identifier: Apache-2.0
// Users' variants and rotations on a GPU: compiled by NVRTC, loaded by the CUDA runtime.
#pragma once

#include "abi/rope_turns.h"
#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "plan/kernel/kernel.h"

namespace flashplan::cuda {

/// Sets the code of `kernel`, which was selected for `options`, to code with their variant and with
/// the rotation `rope` (null: none). The code comes from an earlier call of this process, from the
/// cache on disk, or from NVRTC, and stays loaded until the process ends.
///   kInvalidArgument  the variant does not compile; Variant::compile_log() has the compiler's text
///   kUnsupported      there is no NVRTC
Status compile_variant(const AttentionOptions& options, const RopeTurns* rope,
                       Kernel* kernel) noexcept;

}  // namespace flashplan::cuda
