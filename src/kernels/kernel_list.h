// SPDX-License-Identifier: Apache-2.0
// The attention kernels that were compiled in. The list is generated from kernels.json.
#pragma once

#include <span>

#include "plan/kernel/kernel.h"

namespace flashplan::cuda {

/// One kernel for each instance, which is a choice of family, dtypes, head dims and softcap, and
/// each architecture that it was compiled for. Kernels of an instance are neighbours, and instances
/// are in the order of kernels.json. Empty without CUDA.
std::span<const Kernel> kernels() noexcept;

}  // namespace flashplan::cuda
