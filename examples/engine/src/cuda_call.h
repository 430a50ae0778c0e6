// SPDX-License-Identifier: Apache-2.0
// Errors of the CUDA runtime as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace engine {

/// Throws std::runtime_error for the error that a function has returned.
inline void call(cudaError_t error, const char* function) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(function) + ": " + cudaGetErrorString(error));
}

}  // namespace engine
