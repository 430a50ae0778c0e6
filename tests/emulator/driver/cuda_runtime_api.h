// SPDX-License-Identifier: Apache-2.0
// In the place of the runtime's header, for src/cuda/tensor_maps.cpp: its "driver" encodes maps for
// the emulator. The functions have internal linkage, so that they do not clash with a real
// runtime's.
#pragma once

#include <cuda.h>

#include <cstring>

#include "emulated_map.h"

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr unsigned cudaEnableDefault = 0;

static inline cudaError_t cudaGetLastError() { return cudaSuccess; }

static inline CUresult encode_emulated_map(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank,
                                           void* data, const cuuint64_t* sizes,
                                           const cuuint64_t* strides, const cuuint32_t* box,
                                           const cuuint32_t*, CUtensorMapInterleave,
                                           CUtensorMapSwizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill) {
  constexpr cuuint64_t kAlignment = 16;
  if (reinterpret_cast<uintptr_t>(data) % kAlignment != 0) return 1;
  flashplan::device::EmulatedMap to = {.data = static_cast<const uint16_t*>(data)};
  for (cuuint32_t d = 0; d < rank; ++d) {
    const cuuint64_t bytes = d == 0 ? sizeof(uint16_t) : strides[d - 1];
    if (d > 0 && bytes % kAlignment != 0) return 1;
    to.dims[d] = {static_cast<int64_t>(sizes[d]), static_cast<int64_t>(bytes / sizeof(uint16_t))};
    to.box[d] = static_cast<int32_t>(box[d]);
  }
  *map = {};
  std::memcpy(map, &to, sizeof(to));
  return CUDA_SUCCESS;
}

static inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                           unsigned long long,
                                                           cudaDriverEntryPointQueryResult*) {
  *function = reinterpret_cast<void*>(&encode_emulated_map);
  return cudaSuccess;
}
