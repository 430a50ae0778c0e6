// SPDX-License-Identifier: Apache-2.0
// GPU kernels as they might be compiled in, without code.
#pragma once

#include <string_view>

#include "kernels/families.h"
#include "plan/kernel/kernel.h"

namespace flashplan::test {

/// For bfloat16 and 128 dims.
inline Kernel fake_kernel(std::string_view name, Architecture architecture,
                          KernelGeometry geometry = {.tile_q = 128,
                                                     .tile_kv = 64,
                                                     .bodies = {{{16, 6}, {64, 3}, {128, 2}}},
                                                     .queues_per_processor = 2,
                                                     .threads = 128,
                                                     .smem_bytes = 100 << 10}) {
  Kernel kernel;
  kernel.name = name;
  kernel.family = &kSm80Family;
  kernel.architecture = architecture;
  kernel.q_dtype = kernel.kv_dtype = DType::kBFloat16;
  kernel.head_dim_qk = kernel.head_dim_vo = 128;
  kernel.geometry = geometry;
  kernel.tuning = sm80_tuning(geometry.tile_kv);
  return kernel;
}

}  // namespace flashplan::test
