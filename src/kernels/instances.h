// SPDX-License-Identifier: Apache-2.0
// The attention kernels that were compiled in, as data. The list is generated from kernels.json.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "plan/kernel_config.h"

namespace flashplan {

/// How a kernel wants to be launched where its code is for GPUs with `smem_per_sm`.
struct KernelTiling {
  int32_t smem_per_sm;  // KB, see device::smem_per_sm()
  int32_t tile_q;       // packed query rows of the largest tile
  int32_t few_rows;     // of the smallest one: decode
  int32_t tile_kv;      // keys of a step
  int32_t ctas_per_sm;  // that are there at once
  /// Makes the kernel ready on the current device; once per device before the first launch.
  Status (*prepare)() noexcept;
  LaunchFunction launch;
};

/// One compiled kernel: what it is for.
struct KernelInstance {
  const char* name;  // as "sm80_bf16_e4m3_d128"; lives as long as the library
  KernelFamily family;
  DType q_dtype;
  DType kv_dtype;
  int32_t head_dim_qk;  // serves every head dim up to these
  int32_t head_dim_vo;
  bool softcap;                         // whether it applies one
  std::array<KernelTiling, 3> tilings;  // for each size of shared memory that GPUs have
};

/// All instances; none in a build without CUDA.
std::span<const KernelInstance> kernel_instances() noexcept;

/// The architectures they were compiled for, as "80;90a"; empty in a build without CUDA.
const char* kernel_architectures() noexcept;

}  // namespace flashplan
