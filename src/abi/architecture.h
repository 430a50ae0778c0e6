// SPDX-License-Identifier: Apache-2.0
// GPU architectures, as numbers: 10 * major + minor of the compute capability.
#pragma once

#include <cstdint>

namespace flashplan {

/// The architecture that the code of a kernel was compiled for.
struct Architecture {
  int32_t number = 0;  // 0: the host
  char suffix = '\0';  // 'a', as in sm_90a: runs on 9.0 alone; 'f', as in sm_100f: on 10.x

  friend constexpr bool operator==(Architecture a, Architecture b) {
    return a.number == b.number && a.suffix == b.suffix;
  }
};

/// Shared memory of an SM in KB (CUDA C++ Programming Guide, technical specifications). It includes
/// the 1 KB that CUDA reserves for each CTA.
constexpr int smem_per_sm(int architecture) {
  if (architecture == 80 || architecture == 87) return 164;
  if (architecture < 90 || architecture / 10 == 12) return 100;
  return 228;
}

/// The shared memory of an SM, in KB, of the GPU that this code is being compiled for. In host code
/// the value does not matter.
#ifdef __CUDA_ARCH__
constexpr int kCompiledSmemPerSm = smem_per_sm(__CUDA_ARCH__ / 10);
#else
constexpr int kCompiledSmemPerSm = 228;
#endif

}  // namespace flashplan
