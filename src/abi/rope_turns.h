// SPDX-License-Identifier: Apache-2.0
// The angles of a rotary position embedding, in the form that kernels read.
#pragma once

#include <cstdint>

namespace flashplan {

constexpr int32_t kMaxRotaryDim = 512;

struct RopeTurns {
  bool interleaved = false;
  int32_t rotary_dim = 0;
  float gain = 1.0F;                     // multiplies cos and sin
  double turns[kMaxRotaryDim / 2] = {};  // angle of each pair per position, in turns of 2 pi

  /// The angle of pair `pair` per position, without its whole turns, in units of 2^-64 of a turn.
  uint64_t part_of_turn(int32_t pair) const {
    const double whole = static_cast<double>(static_cast<int64_t>(turns[pair]));
    return static_cast<uint64_t>((turns[pair] - whole) * 0x1p64);
  }
};

}  // namespace flashplan
