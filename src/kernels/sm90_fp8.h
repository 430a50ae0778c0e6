// SPDX-License-Identifier: Apache-2.0
// Makes the Kernel of an instance of the sm90_fp8 family from its compile-time choices.
#pragma once

#include <string_view>
#include <type_traits>

#include "kernels/device/sm90/fp8/attention.h"
#include "kernels/device/traits.h"
#include "kernels/families.h"

namespace flashplan {

template <typename S>
constexpr KernelGeometry sm90_fp8_geometry() {
  return {.tile_q = S::kTileQ,
          .tile_kv = S::kTileKv,
          .bodies = {{{64, S::kSlots / 2}, {S::kTileQ, S::kSlots / 2}}},
          .queues_per_processor = 1,
          .threads = S::kThreads,
          .smem_bytes = device::Sm90Smem<S>::kBytes,
          .uses_tensor_maps = true};
}

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
Kernel make_sm90_fp8_kernel(std::string_view name, Architecture architecture) noexcept {
  static_assert(kQ == DType::kFloat8E4M3 && kKv == DType::kFloat8E4M3);
  using Variant = std::conditional_t<kSoftcap, device::Softcap, device::Standard>;
  using Choices = device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, Variant>;
  using S = device::Sm90Fp8Shape<Choices>;
  Kernel kernel;
  kernel.name = name;
  kernel.family = &kSm90Fp8Family;
  kernel.architecture = architecture;
  kernel.q_dtype = kQ;
  kernel.kv_dtype = kKv;
  kernel.head_dim_qk = kHeadDimQk;
  kernel.head_dim_vo = kHeadDimVo;
  kernel.softcap = kSoftcap;
  kernel.geometry = sm90_fp8_geometry<S>();
  kernel.tuning = sm90_tuning(kernel.geometry.tile_kv);
  const auto code = reinterpret_cast<const void*>(&device::sm90_fp8_attention_kernel<Choices>);
  kernel.code.few_rows_first = code;
  kernel.code.many_rows_first = code;
  return kernel;
}

}  // namespace flashplan
