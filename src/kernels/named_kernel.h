// SPDX-License-Identifier: Apache-2.0
// Sets those members of a Kernel that follow from the compile-time choices in the same way for all
// GPU families.
#pragma once

#include <string_view>
#include <type_traits>

#include "kernels/device/traits.h"
#include "kernels/families.h"

namespace flashplan {

/// A kernel with its names, dtypes and head dims. The caller sets geometry, tuning and code.
template <typename Choices>
Kernel make_named_kernel(std::string_view name, const KernelFamily* family,
                         Architecture architecture) noexcept {
  Kernel kernel;
  kernel.name = name;
  kernel.family = family;
  kernel.architecture = architecture;
  kernel.q_dtype = Choices::kQuery;
  kernel.kv_dtype = Choices::kKv;
  kernel.head_dim_qk = Choices::kHeadDimQk;
  kernel.head_dim_vo = Choices::kHeadDimVo;
  kernel.softcap = std::is_same_v<typename Choices::Variant, device::Softcap>;
  return kernel;
}

}  // namespace flashplan
