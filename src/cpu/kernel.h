// SPDX-License-Identifier: Apache-2.0
// The kernels that kernels.cpp exports, once for each instruction set that it is compiled for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/params.h"

namespace flashplan::cpu {

/// The sizes of tiles, in packed query rows and in keys. A converted tile of 32 keys x 128 floats
/// takes 16 KB and stays in the L1 cache while it is used for all query rows. Prompts are 1 to 4 %
/// faster with 128 rows than with 64, and are planned in 3/4 of the time.
constexpr int32_t kCpuTileQ = 128;
constexpr int32_t kCpuTileKv = 32;

/// Runs queue `cta` with a worker's scratch memory.
using RunQueue = void (*)(const AttentionParams& params, int32_t cta, std::byte* scratch) noexcept;

/// The kernels for one instruction set, one for each kv dtype.
struct KernelSet {
  RunQueue float32, float16, bfloat16, float8_e4m3, float8_e5m2, fp8_ds_mla;

  /// The kernel for a dtype; null for dtypes that caches do not have.
  constexpr RunQueue of(DType kv_dtype) const noexcept {
    switch (kv_dtype) {
      case DType::kFloat32: return float32;
      case DType::kFloat16: return float16;
      case DType::kBFloat16: return bfloat16;
      case DType::kFloat8E4M3: return float8_e4m3;
      case DType::kFloat8E5M2: return float8_e5m2;
      case DType::kFp8DsMla: return fp8_ds_mla;
      case DType::kInt32:
      case DType::kInt64:
      case DType::kUInt32: break;
    }
    return nullptr;
  }
};

namespace baseline {
const KernelSet& kernel_set() noexcept;
}
namespace avx2 {
const KernelSet& kernel_set() noexcept;
}
namespace avx512 {
const KernelSet& kernel_set() noexcept;
}

}  // namespace flashplan::cpu
