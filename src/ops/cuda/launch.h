// SPDX-License-Identifier: Apache-2.0
// Launches the kernel of an operator, whose argument is one plain struct.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/device.h"
#include "cuda/launch_grid.h"

namespace flashplan::cuda {

template <class Params>
Status launch(void (*kernel)(Params), const Grid& grid, Device device, Stream stream,
              Params params) noexcept {
  const DeviceGuard guard(device.index);
  if (!guard.status().ok()) return guard.status();
  cudaKernel_t handle = nullptr;
  FLASHPLAN_CUDA_CALL(cudaGetKernel, &handle, reinterpret_cast<const void*>(kernel));
  const auto* code = reinterpret_cast<const void*>(handle);
  constexpr int kAlwaysAllowed = 32 * 1024;  // besides up to 16 KB that the kernel declares
  if (grid.smem_bytes > kAlwaysAllowed) {
    FLASHPLAN_CUDA_CALL(cudaFuncSetAttribute, code, cudaFuncAttributeMaxDynamicSharedMemorySize,
                        grid.smem_bytes);
  }
  constexpr int kPortableCluster = 8;
  if (grid.cluster > kPortableCluster) {
    FLASHPLAN_CUDA_CALL(cudaFuncSetAttribute, code, cudaFuncAttributeNonPortableClusterSizeAllowed,
                        1);
  }
  return launch_grid(handle, grid, stream, &params);
}

}  // namespace flashplan::cuda
