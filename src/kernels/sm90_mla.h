// SPDX-License-Identifier: Apache-2.0
// Makes the Kernel of an instance of the sm90_mla family from its compile-time choices.
#pragma once

#include <string_view>

#include "kernels/device/sm90/mla/attention.h"
#include "kernels/device/traits.h"
#include "kernels/families.h"
#include "kernels/named_kernel.h"

namespace flashplan {

/// The geometry of kernels in which each of two warpgroups computes half of o's columns: those of
/// sm90_mla, sm90_mla_pairs and sm90_wide.
template <typename S>
constexpr KernelGeometry mla_geometry() {
  return {.tile_q = S::kRowsOfTile,
          .tile_kv = S::kTileKv,
          .bodies = {{{S::kRowsOfTile, S::kSlots}}},
          .queues_per_processor = 1,
          .ctas_of_queue = S::kCtas,
          .threads = S::kThreads,
          .smem_bytes = device::MlaSmem<S>::kBytes,
          .uses_tensor_maps = true};
}

template <DType kQ, DType kKv, int kHeadDimQk, int kHeadDimVo, bool kSoftcap>
Kernel make_sm90_mla_kernel(std::string_view name, Architecture architecture) noexcept {
  static_assert(!kSoftcap);
  using Choices = device::Traits<kQ, kKv, kHeadDimQk, kHeadDimVo, device::Standard>;
  Kernel kernel = make_named_kernel<Choices>(name, &kSm90MlaFamily, architecture);
  kernel.geometry = mla_geometry<device::MlaShape<Choices>>();
  kernel.tuning = sm90_mla_tuning();
  const auto code = reinterpret_cast<const void*>(&device::sm90_mla_kernel<Choices>);
  kernel.code.few_rows_first = code;
  kernel.code.many_rows_first = code;
  return kernel;
}

}  // namespace flashplan
