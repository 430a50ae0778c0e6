// SPDX-License-Identifier: Apache-2.0
// A build without CUDA has no kernels for GPUs.
#include "kernels/kernel_list.h"

namespace flashplan::cuda {

std::span<const Kernel> kernels() noexcept { return {}; }

}  // namespace flashplan::cuda
