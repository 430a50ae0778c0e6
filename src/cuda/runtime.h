// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime and the types of the driver, for host code. No other file includes their
// headers, so a test can put a runtime of its own here, in which any call fails (tests/fake_cuda).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/device.h"

namespace flashplan::cuda {

/// Returns whether a call of CUDA succeeded. If it failed, clears the runtime's last error, so that
/// other users of CUDA do not find it. It is for calls that clean up, or whose failure is no error.
inline bool succeeded(cudaError_t code) noexcept {
  if (code != cudaSuccess) static_cast<void>(cudaGetLastError());
  return code == cudaSuccess;
}

}  // namespace flashplan::cuda

/// Returns from the enclosing function if function(arguments...), of the CUDA runtime, fails.
#define FLASHPLAN_CUDA_CALL(function, ...)                                             \
  do {                                                                                 \
    const auto code_of_call = function(__VA_ARGS__);                                   \
    if (code_of_call != cudaSuccess)                                                   \
      return ::flashplan::cuda::cuda_error(#function, static_cast<int>(code_of_call)); \
  } while (false)
