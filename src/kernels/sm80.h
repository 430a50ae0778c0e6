// SPDX-License-Identifier: Apache-2.0
// Makes the Kernel of an instance of the sm80 family from its compile-time choices.
#pragma once

#include <string_view>
#include <type_traits>

#include "kernels/device/sm80/attention.h"
#include "kernels/families.h"
#include "kernels/named_kernel.h"

namespace flashplan {

template <typename Choices, int kSmemPerSm>
constexpr KernelGeometry sm80_geometry() {
  using T = device::Tiling<Choices, kSmemPerSm>;
  using S = device::Shapes<T>;
  constexpr int kPairedDims = device::kPairedDims<T>;
  static_assert(kPairedDims == 0 || (device::FewRowsShape<T, 1>::kSmemBytes <= S::kSmemBytes &&
                                     device::FewRowsShape<T, 2>::kSmemBytes <= S::kSmemBytes));
  KernelGeometry geometry = {.tile_q = T::kTileQ,
                             .tile_kv = T::kTileKv,
                             .paired_dims = kPairedDims,
                             .bodies = {{{S::Few::kRows, S::Few::kStages}}},
                             .queues_per_processor = T::kCtasPerSm,
                             .threads = T::kThreads,
                             .smem_bytes = S::kSmemBytes};
  if constexpr (!T::kFewRowsAlone) {
    geometry.bodies[1] = {S::Some::kRows, S::Some::kStages};
    if (S::Many::kRows > S::Some::kRows) geometry.bodies[2] = {S::Many::kRows, S::Many::kStages};
  }
  return geometry;
}

/// Whether the kernel needs a GPU with 228 KB of shared memory per SM.
template <typename Choices>
constexpr bool kIsWidest = device::Tiling<Choices, 228>::kIsWidest;

/// The geometry depends on the architecture's shared memory. Both this function and the device code
/// take it from Tiling and Shapes.
template <typename Choices>
constexpr KernelGeometry sm80_geometry(Architecture architecture) {
  if constexpr (kIsWidest<Choices>) {
    return sm80_geometry<Choices, 228>();
  } else {
    switch (smem_per_sm(architecture.number)) {
      case 100: return sm80_geometry<Choices, 100>();
      case 164: return sm80_geometry<Choices, 164>();
      default: return sm80_geometry<Choices, 228>();
    }
  }
}

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
Kernel make_sm80_kernel(std::string_view name, Architecture architecture) noexcept {
  using Variant = std::conditional_t<kSoftcap, device::Softcap, device::Standard>;
  using Choices = device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, Variant>;
  Kernel kernel = make_named_kernel<Choices>(name, &kSm80Family, architecture);
  // Heads of 80 dims have a kernel of their own, because their code would make the kernel for 128
  // dims slower.
  constexpr bool kHas80Dims =
      kHeadDimQk == 128 && kHeadDimVo == 128 && kQ == kKv && item_size(kKv) > 1;
  using Short = std::conditional_t<kHas80Dims, device::With80Dims<Choices>, Choices>;
  kernel.geometry = sm80_geometry<Short>(architecture);
  kernel.few_rows_geometry = sm80_geometry<device::FewRowsAlone<Choices>>(architecture);
  kernel.tuning = sm80_tuning(kernel.geometry.tile_kv);
  kernel.code.few_rows_first =
      reinterpret_cast<const void*>(&device::attention_kernel<Choices, true>);
  if constexpr (kHas80Dims) {
    kernel.code.short_rows_first =
        reinterpret_cast<const void*>(&device::attention_kernel<Short, true>);
  }
  // The widest kernels are compiled only once, with the body for few rows first, to keep the
  // library small.
  kernel.code.many_rows_first =
      reinterpret_cast<const void*>(&device::attention_kernel<Choices, kIsWidest<Choices>>);
  if constexpr (Choices::kTakesKeyTails) kernel.code.key_tails = kernel.code.many_rows_first;
  return kernel;
}

}  // namespace flashplan
