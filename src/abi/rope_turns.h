// SPDX-License-Identifier: Apache-2.0
// A rotary position embedding as kernels read it.
#pragma once

#include <cstdint>

namespace flashplan {

constexpr int32_t kMaxRotaryDim = 512;

struct RopeTurns {
  bool interleaved = false;
  int32_t rotary_dim = 0;
  float gain = 1.0F;                     // of cos and sin
  double turns[kMaxRotaryDim / 2] = {};  // of each pair from one position to the next, of 2 pi
};

}  // namespace flashplan
