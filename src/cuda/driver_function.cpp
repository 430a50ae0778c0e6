// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver_function.h"

#include <cuda_runtime_api.h>

namespace flashplan::cuda {

void* driver_function(const char* name) noexcept {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned kSince = 12000;
  if (cudaGetDriverEntryPointByVersion(name, &function, kSince, cudaEnableDefault, &result) !=
      cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  return function;
}

}  // namespace flashplan::cuda
