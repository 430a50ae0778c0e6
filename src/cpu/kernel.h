// SPDX-License-Identifier: Apache-2.0
// What kernel.cpp exports once per instruction set it is compiled for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/params.h"

namespace flashplan::cpu {

/// Runs queue `cta` with a worker's scratch memory.
using RunQueue = void (*)(const AttentionParams& params, int32_t cta, std::byte* scratch) noexcept;

/// By kv dtype, in the order of DType.
struct KernelSet {
  RunQueue run_queue[5];
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
