// SPDX-License-Identifier: Apache-2.0
// Makes the Kernel of an instance of the sm90_wide family from its compile-time choices.
#pragma once

#include <string_view>
#include <type_traits>

#include "kernels/device/sm90/wide/attention.h"
#include "kernels/device/traits.h"
#include "kernels/families.h"

namespace flashplan {

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
Kernel make_sm90_wide_kernel(std::string_view name, Architecture architecture) noexcept {
  using Variant = std::conditional_t<kSoftcap, device::Softcap, device::Standard>;
  using Choices = device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, Variant>;
  using S = device::WideShape<Choices>;
  Kernel kernel;
  kernel.name = name;
  kernel.family = &kSm90WideFamily;
  kernel.architecture = architecture;
  kernel.q_dtype = kQ;
  kernel.kv_dtype = kKv;
  kernel.head_dim_qk = kHeadDimQk;
  kernel.head_dim_vo = kHeadDimVo;
  kernel.softcap = kSoftcap;
  kernel.geometry.tile_q = S::kTileQ;
  kernel.geometry.tile_kv = S::kTileKv;
  kernel.geometry.bodies[0] = {S::kTileQ, S::kSlots};
  kernel.geometry.queues_per_processor = 1;
  kernel.geometry.threads = S::kThreads;
  kernel.geometry.smem_bytes = device::MlaSmem<S>::kBytes;
  kernel.geometry.uses_tensor_maps = true;
  kernel.tuning = sm90_wide_tuning();
  const auto code = reinterpret_cast<const void*>(&device::sm90_wide_kernel<Choices>);
  kernel.code.few_rows_first = code;
  kernel.code.many_rows_first = code;
  kernel.code.key_tails = code;
  return kernel;
}

}  // namespace flashplan
