// SPDX-License-Identifier: Apache-2.0
// Makes the Kernel of an instance of the sm90_gather family from its compile-time choices.
#pragma once

#include <string_view>
#include <type_traits>

#include "kernels/sm90.h"

namespace flashplan {

/// The choices of a kernel of the sm90 family whose keys and values are copied row by row.
template <DType kQ, int kHeadDim, typename Variant>
struct Gathering : device::Traits<kQ, kQ, kHeadDim, kHeadDim, Variant> {
  static constexpr bool kGathers = true;
};

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
Kernel make_sm90_gather_kernel(std::string_view name, Architecture architecture) noexcept {
  static_assert(kQ == kKv && kHeadDimQk == kHeadDimVo);
  using Variant = std::conditional_t<kSoftcap, device::Softcap, device::Standard>;
  return make_hopper_kernel<Gathering<kQ, kHeadDimQk, Variant>>(name, &kSm90GatherFamily,
                                                                architecture);
}

}  // namespace flashplan
