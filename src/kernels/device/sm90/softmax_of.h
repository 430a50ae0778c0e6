// SPDX-License-Identifier: Apache-2.0
// Which class turns the logits of a kernel of the sm90 family into weights.
#pragma once

#include "kernels/device/sm90/linear_softmax.h"
#include "kernels/device/sm90/variant_softmax.h"

namespace flashplan::device {

template <typename S, bool kIsLinear, bool kNeedsPositions>
struct Sm90SoftmaxChoice {
  using Type = Sm90Softmax<S>;
};
template <typename S>
struct Sm90SoftmaxChoice<S, false, true> {
  using Type = Sm90VariantSoftmax<S>;
};
template <typename S>
struct Sm90SoftmaxChoice<S, true, true> {
  using Type = Sm90LinearSoftmax<S>;
};

template <typename S>
using Sm90SoftmaxOf =
    typename Sm90SoftmaxChoice<S, S::Variant::kIsLinear,
                               S::Variant::kReadsPositions || !S::Variant::kUseSoftmax>::Type;

}  // namespace flashplan::device
