// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch of operators: a kernel may be launched while the kernel before it
// in the stream ends.
#pragma once

#include <algorithm>
#include <iterator>

#include "cuda/device.h"

namespace flashplan::cuda {

/// Waits until all kernels before this one in the stream have ended, and what they wrote can be
/// read. A kernel with programmatic dependent launch calls it before it touches memory. After a
/// plain launch it does nothing.
__device__ inline void wait_for_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Whether wait_for_kernels_before() really waits on the device, in kernels of the file that
/// includes this header. It does if the file is compiled for exactly the device's architecture, and
/// this is 9.0 or later: code for older architectures does not have the instruction.
inline bool can_wait(Device device) noexcept {
  const DeviceFacts& facts = device_facts(device.index);
#ifdef __CUDA_ARCH_LIST__
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
#else
  constexpr int kArchitectures[] = {0};  // only nvcc lists the architectures
#endif
  const int architecture = 100 * facts.major + 10 * facts.minor;
  return facts.major >= 9 && std::find(std::begin(kArchitectures), std::end(kArchitectures),
                                       architecture) != std::end(kArchitectures);
}

}  // namespace flashplan::cuda
