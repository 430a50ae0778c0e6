// SPDX-License-Identifier: Apache-2.0
// The launch of a kernel that takes one plain struct.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/device.h"

namespace flashplan::cuda {

template <class Params>
Status launch(void (*kernel)(Params), dim3 grid, int threads, Device device, Stream stream,
              Params params) noexcept {
  const DeviceGuard guard(device.index);
  if (!guard.status().ok()) return guard.status();
  void* arguments[] = {&params};
  FLASHPLAN_CUDA_CALL(cudaLaunchKernel, reinterpret_cast<const void*>(kernel), grid,
                      dim3(static_cast<unsigned>(threads)), arguments, 0, stream);
  return {};
}

}  // namespace flashplan::cuda
