// SPDX-License-Identifier: Apache-2.0
// Makes the Kernel of an instance of the sm90 family from its compile-time choices.
#pragma once

#include <string_view>
#include <type_traits>

#include "kernels/device/sm90/attention.h"
#include "kernels/device/traits.h"
#include "kernels/families.h"
#include "kernels/named_kernel.h"

namespace flashplan {

template <typename Choices>
constexpr KernelGeometry sm90_geometry() {
  using S = device::Sm90Shape<Choices>;
  return {.tile_q = S::kTileQ,
          .tile_kv = S::kTileKv,
          .bodies = {{{64, S::kSlots / 2}, {S::kTileQ, S::kSlots / 2}}},
          .queues_per_processor = 1,
          .threads = S::kThreads,
          .smem_bytes = device::Sm90Smem<S>::kBytes,
          .uses_tensor_maps = true,
          .gathers = S::kGathers || S::kWidens,
          .prepares_some = S::kWidens,
          .prepared_key_bytes = S::kTakesPrepared ? S::kKeyBytes : 0,
          .prepared_value_bytes = S::kTakesPreparedValues ? S::kValueBytes : 0};
}

/// Stands for all variants with a rotation, since they have the same geometry.
struct Rotating : device::Standard {
  static constexpr bool kRotates = true;
  static constexpr bool kInterleaved = false;
  static constexpr int kRotaryDim = 16;
};

/// `Choices` for keys whose last dims are in a tensor of their own. Such keys have code of their
/// own, because one loader for both sorts of keys would need more registers than the producer warps
/// have.
template <typename Choices>
struct WithKeyTails : Choices {
  static constexpr bool kHasKeyTail = true;
};

/// A kernel of any family that uses the sm90 family's code (sm90, sm90_gather, sm90_widen).
template <typename Choices>
Kernel make_hopper_kernel(std::string_view name, const KernelFamily* family,
                          Architecture architecture) noexcept {
  Kernel kernel = make_named_kernel<Choices>(name, family, architecture);
  if (device::Sm90Shape<Choices>::kTakesNarrowQueries) kernel.narrow_q_dtype = Choices::kKv;
  kernel.geometry = sm90_geometry<Choices>();
  kernel.tuning =
      sm90_tuning(kernel.geometry.tile_kv, kernel.geometry.gathers, kernel.geometry.prepares_some);
  const auto code = reinterpret_cast<const void*>(&device::sm90_attention_kernel<Choices>);
  kernel.code.few_rows_first = code;
  kernel.code.many_rows_first = code;
  return kernel;
}

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
Kernel make_sm90_kernel(std::string_view name, Architecture architecture) noexcept {
  using Variant = std::conditional_t<kSoftcap, device::Softcap, device::Standard>;
  using Choices = device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, Variant>;
  Kernel kernel = make_hopper_kernel<Choices>(name, &kSm90Family, architecture);
  if constexpr (kHeadDimVo <= 128) {
    kernel.rotating_geometry =
        sm90_geometry<device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, Rotating>>();
  }
  if constexpr (Choices::kTakesKeyTails) {
    kernel.code.key_tails =
        reinterpret_cast<const void*>(&device::sm90_attention_kernel<WithKeyTails<Choices>>);
  }
  return kernel;
}

}  // namespace flashplan
