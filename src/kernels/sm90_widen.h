// SPDX-License-Identifier: Apache-2.0
// Makes the Kernel of an instance of the sm90_widen family from its compile-time choices.
#pragma once

#include <string_view>
#include <type_traits>

#include "kernels/sm90.h"

namespace flashplan {

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
Kernel make_sm90_widen_kernel(std::string_view name, Architecture architecture) noexcept {
  static_assert(kQ != kKv && kHeadDimQk == kHeadDimVo);
  using Variant = std::conditional_t<kSoftcap, device::Softcap, device::Standard>;
  using Choices = device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, Variant>;
  return make_hopper_kernel<Choices>(name, &kSm90WidenFamily, architecture);
}

}  // namespace flashplan
