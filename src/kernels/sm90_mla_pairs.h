// SPDX-License-Identifier: Apache-2.0
// Makes the Kernel of an instance of the sm90_mla_pairs family from its compile-time choices.
#pragma once

#include <string_view>

#include "kernels/sm90_mla.h"

namespace flashplan {

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
Kernel make_sm90_mla_pairs_kernel(std::string_view name, Architecture architecture) noexcept {
  static_assert(!kSoftcap);
  using Choices = device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, device::Standard>;
  Kernel kernel = make_named_kernel<Choices>(name, &kSm90MlaPairsFamily, architecture);
  kernel.geometry = mla_geometry<device::MlaShape<Choices, true>>();
  kernel.tuning = sm90_mla_pairs_tuning();
  const auto code = reinterpret_cast<const void*>(&device::sm90_mla_pairs_kernel<Choices>);
  kernel.code.few_rows_first = code;
  kernel.code.many_rows_first = code;
  return kernel;
}

}  // namespace flashplan
