// SPDX-License-Identifier: Apache-2.0
// Wiring of the sm80 family: from a kernel's compile-time choices to its KernelInstance.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "common/error.h"
#include "cuda/device.h"
#include "kernels/device/attention.h"
#include "kernels/instances.h"

namespace flashplan {

/// Tiling is the host's guess of which code the driver takes: this makes sure.
template <typename Choices, int kSmemPerSm>
Status prepare_sm80() noexcept {
  cudaFuncAttributes attributes;
  FLASHPLAN_CUDA_CALL(cudaFuncGetAttributes, &attributes, device::attention_kernel<Choices, true>);
  if (device::smem_per_sm(attributes.ptxVersion) != kSmemPerSm) {
    return error(StatusCode::kUnsupported,
                 "device: expected code for GPUs with %d KB of shared memory per SM, got code for "
                 "sm_%d",
                 kSmemPerSm, attributes.ptxVersion);
  }
  constexpr cudaFuncAttribute kBytes = cudaFuncAttributeMaxDynamicSharedMemorySize;
  constexpr int kSmemBytes = device::Shapes<device::Tiling<Choices, kSmemPerSm>>::kSmemBytes;
  FLASHPLAN_CUDA_CALL(cudaFuncSetAttribute, device::attention_kernel<Choices, false>, kBytes,
                      kSmemBytes);
  FLASHPLAN_CUDA_CALL(cudaFuncSetAttribute, device::attention_kernel<Choices, true>, kBytes,
                      kSmemBytes);
  return {};
}

template <typename Choices, int kSmemPerSm>
Status launch_sm80(const AttentionParams& params, Stream stream) noexcept {
  using T = device::Tiling<Choices, kSmemPerSm>;
  void* arguments[] = {const_cast<AttentionParams*>(&params)};
  const auto kernel = params.host.has_few_rows ? &device::attention_kernel<Choices, true>
                                               : &device::attention_kernel<Choices, false>;
  FLASHPLAN_CUDA_CALL(cudaLaunchKernel, reinterpret_cast<const void*>(kernel),
                      dim3(static_cast<unsigned>(params.schedule.num_ctas)), dim3(T::kThreads),
                      arguments, device::Shapes<T>::kSmemBytes, stream);
  return {};
}

template <typename Choices, int kSmemPerSm>
constexpr KernelTiling sm80_tiling() {
  using T = device::Tiling<Choices, kSmemPerSm>;
  return {kSmemPerSm,
          T::kTileQ,
          device::Shapes<T>::Few::kRows,
          T::kTileKv,
          T::kCtasPerSm,
          prepare_sm80<Choices, kSmemPerSm>,
          launch_sm80<Choices, kSmemPerSm>};
}

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
KernelInstance make_sm80_instance(const char* name) {
  using Variant = std::conditional_t<kSoftcap, device::Softcap, device::Standard>;
  using Choices = device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, Variant>;
  return {name,
          KernelFamily::kSm80,
          kQ,
          kKv,
          kHeadDimQk,
          kHeadDimVo,
          kSoftcap,
          {sm80_tiling<Choices, 100>(), sm80_tiling<Choices, 164>(), sm80_tiling<Choices, 228>()}};
}

}  // namespace flashplan
