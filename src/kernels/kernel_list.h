// SPDX-License-Identifier: Apache-2.0
// The attention kernels that were compiled in. The list is generated from kernels.json.
#pragma once

#include <span>

#include "plan/kernel.h"

namespace flashplan::cuda {

/// One for each instance and architecture that it was compiled for; those of an instance stand
/// together, in the order of kernels.json. None in a build without CUDA.
std::span<const Kernel> kernels() noexcept;

}  // namespace flashplan::cuda
