// SPDX-License-Identifier: Apache-2.0
// Launches the kernel of an operator, whose argument is one plain struct.
#pragma once

#include <cstddef>

#include "cuda/device.h"
#include "cuda/runtime.h"

namespace flashplan::cuda {

struct Grid {
  dim3 ctas;
  dim3 threads;  // threads of a CTA
  // CTAs of a cluster, along x; divides ctas.x. 0: the launch has no cluster attribute. Kernels
  // that use st.async need the attribute even for clusters of one CTA: without it, a CTA's st.async
  // to its own memory fails with an illegal instruction.
  int cluster = 0;
  int smem_bytes = 0;  // bytes of dynamic shared memory
  // Programmatic dependent launch. The kernel must begin with wait_for_kernels_before(), and
  // can_wait() must be true.
  bool pdl = false;
};

template <class Params>
Status launch(void (*kernel)(Params), const Grid& grid, Device device, Stream stream,
              Params params) noexcept {
  const DeviceGuard guard(device.index);
  if (!guard.status().ok()) return guard.status();
  const auto* code = reinterpret_cast<const void*>(kernel);
  constexpr int kAlwaysAllowed = 32 * 1024;  // of CUDA's 48 KB, 16 KB are for static shared memory
  if (grid.smem_bytes > kAlwaysAllowed) {
    FLASHPLAN_CUDA_CALL(cudaFuncSetAttribute, code, cudaFuncAttributeMaxDynamicSharedMemorySize,
                        grid.smem_bytes);
  }
  constexpr int kPortableCluster = 8;
  if (grid.cluster > kPortableCluster) {
    FLASHPLAN_CUDA_CALL(cudaFuncSetAttribute, code, cudaFuncAttributeNonPortableClusterSizeAllowed,
                        1);
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned num_attributes = 0;
  if (grid.cluster > 0) {
    cudaLaunchAttribute& cluster = attributes[num_attributes++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(grid.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  if (grid.pdl) {
    cudaLaunchAttribute& pdl = attributes[num_attributes++];
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid.ctas;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = static_cast<std::size_t>(grid.smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  void* arguments[] = {&params};
  FLASHPLAN_CUDA_CALL(cudaLaunchKernelExC, &config, code, arguments);
  return {};
}

}  // namespace flashplan::cuda
