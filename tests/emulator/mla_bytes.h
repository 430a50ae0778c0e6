// SPDX-License-Identifier: Apache-2.0
// Caches of multi-head latent attention with 8 bits for most numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/float_formats.h"

namespace flashplan::test {

/// Rows of bytes, 0xff (which is NaN) but where something is written.
struct ByteRows {
  ByteRows(int64_t num_rows, int64_t num_bytes, int64_t gap)
      : stride(num_bytes + gap),
        memory(static_cast<size_t>(num_rows * stride + 32), 0xff),
        // At a multiple of 16, if the gap is one.
        first(memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 15U) + gap % 16) {}
  uint8_t* row(int64_t r) { return first + r * stride; }
  int64_t stride;
  std::vector<uint8_t> memory;
  uint8_t* first;
};

using Narrow = cpu::Format<DType::kFloat8E4M3>;

/// Writes numbers as 8-bit floats, and replaces them by what these are.
inline void narrow(float* numbers, int32_t count, float scale, uint8_t* to) {
  for (int32_t i = 0; i < count; ++i) {
    to[i] = Narrow::store(numbers[i] / scale);
    numbers[i] = Narrow::load(to[i]) * scale;
  }
}

/// Writes a key of 576 dims as a row of kFp8DsMla, and replaces its numbers by what that is.
inline void narrow_ds_mla(float* numbers, uint8_t* to) {
  for (int32_t i = 0; i < 4; ++i) {
    float* group = numbers + 128 * i;
    float largest = 0;
    for (int32_t d = 0; d < 128; ++d) largest = std::max(largest, std::fabs(group[d]));
    const float scale = largest / 448.0F;
    narrow(group, 128, scale, to + 128 * i);
    std::memcpy(to + 512 + 4 * i, &scale, 4);
  }
  for (int32_t d = 512; d < 576; ++d) {
    using Tail = cpu::Format<DType::kBFloat16>;
    const uint16_t bits = Tail::store(numbers[d]);
    std::memcpy(to + 528 + 2 * (d - 512), &bits, 2);
    numbers[d] = Tail::load(bits);
  }
}

}  // namespace flashplan::test
