// SPDX-License-Identifier: Apache-2.0
// What the kernels of every family are compiled for.
#pragma once

#include "kernels/device/element.h"
#include "kernels/device/variant.h"

namespace flashplan::device {

/// The compile-time choices of a kernel. `kQuery_`: the dtype of the tensor q.
template <DType kQuery_, DType kKv_, int kHeadDimQk_, int kHeadDimVo_, typename Variant_>
struct Traits {
  static constexpr DType kQuery = kQuery_;
  static constexpr bool kWidensQueries = Element<kQuery>::kBytes == 1;
  // The dtype that queries have in products. 8-bit queries are widened, which is exact.
  static constexpr DType kQ = kWidensQueries ? DType::kFloat16 : kQuery;
  // The dtype of o for which the fast way of writing results is compiled.
  static constexpr DType kOutput = kWidensQueries ? DType::kBFloat16 : kQuery;
  static constexpr DType kKv = kKv_;
  static constexpr int kHeadDimQk = kHeadDimQk_;
  static constexpr int kHeadDimVo = kHeadDimVo_;
  static constexpr bool kGathers = false;  // true: sm90_gather, which copies keys row by row
  // kTakesKeyTails: whether there is code for keys whose last dims are in a tensor of their own;
  // models have such keys only with more than 128 dims. kHasKeyTail: whether the kernel takes such
  // keys alone (WithKeyTails of the sm90 family).
  static constexpr bool kTakesKeyTails = kHeadDimQk > 128;
  static constexpr bool kHasKeyTail = false;
  static constexpr bool kFewRowsAlone = false;  // true: only code for few rows is compiled
  // Decodes with this head dim read the rows of two kv heads together, because memory delivers less
  // if rows as short as these are read one by one. 0: decodes read each head by itself.
  static constexpr int kShortRowDims =
      kHeadDimQk == kHeadDimVo && kHeadDimQk * Element<kKv>::kBytes <= 128 ? kHeadDimQk : 0;
  using Variant = Variant_;
  // The dtype of weights and values in their product. 8-bit values are widened to float16, which
  // takes fewer instructions than bfloat16. The weights of a softmax are small enough for float16;
  // other weights may not be.
  static constexpr DType kWeight =
      Element<kKv>::kBytes == 1 && Variant::kUseSoftmax && !Variant::kTransformsValue
          ? DType::kFloat16
          : kQ;
};

}  // namespace flashplan::device
