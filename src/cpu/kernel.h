// SPDX-License-Identifier: Apache-2.0
// What kernels.cpp exports once per instruction set it is compiled for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/params.h"

namespace flashplan::cpu {

/// Tiles: packed query rows, and keys. A converted tile of 32 keys x 128 floats takes 16 KB and
/// stays in the first-level cache while the rows of a query tile pass over it. Prompts are 1 to 4 %
/// faster with 128 rows than with 64, and are planned in 3/4 of the time.
constexpr int32_t kCpuTileQ = 128;
constexpr int32_t kCpuTileKv = 32;

/// Runs queue `cta` with a worker's scratch memory.
using RunQueue = void (*)(const AttentionParams& params, int32_t cta, std::byte* scratch) noexcept;

/// What the cache of a kernel may store.
constexpr DType kKvDTypes[] = {DType::kFloat32,    DType::kFloat16,    DType::kBFloat16,
                               DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFp8DsMla};

struct KernelSet {
  RunQueue run_queue[6];  // in the order of kKvDTypes
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
