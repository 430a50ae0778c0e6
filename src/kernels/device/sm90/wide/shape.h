// SPDX-License-Identifier: Apache-2.0
// Sizes of the sm90_wide family.
#pragma once

#include "kernels/device/sm90/mla/shape.h"
#include "kernels/device/sm90/wide/softmax.h"

namespace flashplan::device {

/// `Choices`: see Traits. A work tile is computed as by the sm90_mla family: two warpgroups have
/// half of the output's columns each, and take turns in computing logits. But values are tensors of
/// their own: a slot has the keys of a block, and then its values (MlaSharedMemory, 10). Blocks of
/// 64 keys, of which half are in shared memory at once, need a fifth less of its bandwidth than
/// blocks of 32: queries are read for each block (docs/tuning/sm90-wide.md).
template <typename Choices>
struct WideShape : MlaShape<Choices> {
  static constexpr bool kHasValues = true;
  template <typename S>
  using Softmax = WideSoftmax<S>;
  static_assert(Choices::kHeadDimQk == Choices::kHeadDimVo);
  static_assert(Choices::kKv == Choices::kQ && !Choices::kWidensQueries);
};

}  // namespace flashplan::device
