// SPDX-License-Identifier: Apache-2.0
// Makes the Kernel of an instance of the sm90 family from its compile-time choices.
#pragma once

#include <string_view>
#include <type_traits>

#include "kernels/device/shape.h"
#include "kernels/device/sm90_attention.h"
#include "kernels/families.h"

namespace flashplan {

template <typename Choices>
constexpr KernelGeometry sm90_geometry() {
  using S = device::Sm90Shape<Choices>;
  return {.tile_q = S::kTileQ,
          .tile_kv = S::kTileKv,
          .bodies = {{{64, S::kSlots / 2}, {S::kTileQ, S::kSlots / 2}}},
          .queues_per_processor = 1,
          .threads = S::kThreads,
          .smem_bytes = S::kSmemBytes,
          .uses_tensor_maps = true};
}

/// Stands for all variants with a rotation: they have the same geometry.
struct Rotating : device::Standard {
  static constexpr bool kRotates = true;
};

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
Kernel make_sm90_kernel(std::string_view name, Architecture architecture) noexcept {
  static_assert(kQ == kKv);
  using Variant = std::conditional_t<kSoftcap, device::Softcap, device::Standard>;
  using Choices = device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, Variant>;
  Kernel kernel;
  kernel.name = name;
  kernel.family = &kSm90Family;
  kernel.architecture = architecture;
  kernel.q_dtype = kQ;
  kernel.kv_dtype = kKv;
  kernel.head_dim_qk = kHeadDimQk;
  kernel.head_dim_vo = kHeadDimVo;
  kernel.softcap = kSoftcap;
  kernel.geometry = sm90_geometry<Choices>();
  if constexpr (kHeadDimVo <= 128) {
    kernel.rotating_geometry =
        sm90_geometry<device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, Rotating>>();
  }
  kernel.tuning = sm90_tuning(kernel.geometry.tile_kv);
  const auto code = reinterpret_cast<const void*>(&device::sm90_attention_kernel<Choices>);
  kernel.code.few_rows_first = code;
  kernel.code.many_rows_first = code;
  return kernel;
}

}  // namespace flashplan
