// SPDX-License-Identifier: Apache-2.0
// Makes the Kernel of an instance of the sm90_wide family from its compile-time choices.
#pragma once

#include <string_view>
#include <type_traits>

#include "kernels/device/sm90/wide/attention.h"
#include "kernels/device/traits.h"
#include "kernels/families.h"
#include "kernels/named_kernel.h"
#include "kernels/sm90_mla.h"

namespace flashplan {

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
Kernel make_sm90_wide_kernel(std::string_view name, Architecture architecture) noexcept {
  using Variant = std::conditional_t<kSoftcap, device::Softcap, device::Standard>;
  using Choices = device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, Variant>;
  Kernel kernel = make_named_kernel<Choices>(name, &kSm90WideFamily, architecture);
  kernel.geometry = mla_geometry<device::WideShape<Choices>>();
  kernel.tuning = sm90_wide_tuning();
  const auto code = reinterpret_cast<const void*>(&device::sm90_wide_kernel<Choices>);
  kernel.code.few_rows_first = code;
  kernel.code.many_rows_first = code;
  kernel.code.key_tails = code;
  return kernel;
}

}  // namespace flashplan
