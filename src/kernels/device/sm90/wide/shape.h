// SPDX-License-Identifier: Apache-2.0
// Sizes of the sm90_wide family.
#pragma once

#include "kernels/device/sm90/mla/shape.h"
#include "kernels/device/sm90/wide/softmax.h"

namespace flashplan::device {

/// The sizes of a kernel that is compiled for `Choices` (device/traits.h). A work tile is computed
/// as in the sm90_mla family: two warpgroups have half of the output's columns each, and take turns
/// in computing logits. But values are tensors of their own, so a slot has the keys of a block, and
/// then its values. This leaves room for blocks of 64 keys. With blocks of 32 keys, a slot could
/// hold keys and values at the same time, but queries would be read twice as often, and shared
/// memory would cap the rate at 600 instead of 720 TFLOP/s (docs/tuning/sm90-wide.md).
template <typename Choices>
struct WideShape : MlaShape<Choices> {
  static constexpr bool kHasValues = true;
  template <typename S>
  using Softmax = WideSoftmax<S>;
  static_assert(Choices::kHeadDimQk == Choices::kHeadDimVo);
  static_assert(Choices::kKv == Choices::kQ && !Choices::kWidensQueries);
};

}  // namespace flashplan::device
