// SPDX-License-Identifier: Apache-2.0
// Copies to shared memory from rows of any alignment.
#pragma once

#include "kernels/device/ptx.h"

namespace flashplan::device {

/// Copies 16 bytes of a row at any alignment, element by element. Only the first `num_valid`
/// elements are read; the others become zeros.
template <int kBytes>
FLASHPLAN_DEVICE void copy_unaligned_16(uint32_t to, const unsigned char* from, int num_valid) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    if (i < num_valid) {
      const uint32_t element =
          kBytes == 1 ? from[i] : *reinterpret_cast<const uint16_t*>(from + i * kBytes);
      words[i * kBytes / 4] |= element << (i * kBytes % 4 * 8);
    }
  }
  store_shared_16(to, {words[0], words[1], words[2], words[3]});
}

}  // namespace flashplan::device
