// SPDX-License-Identifier: Apache-2.0
// Rows in shared memory, laid out so that neither 16-byte writes nor ldmatrix meet bank conflicts.
#pragma once

#include "kernels/device/ptx.h"

namespace flashplan::device {

/// Rows of kRowBytes. The 16-byte chunks of a row change places with the row, so that the same
/// chunk of 8 consecutive rows lies in 8 different groups of banks.
template <int kRowBytes_>
struct SharedTile {
  static constexpr int kRowBytes = kRowBytes_;
  static constexpr int kChunks = kRowBytes / 16;
  static_assert(kRowBytes % 32 == 0);

  /// What a row's chunk numbers are combined with.
  static FLASHPLAN_DEVICE int permutation(int row) {
    if constexpr (kChunks % 8 == 0) {
      return row & 7;
    } else if constexpr (kChunks % 4 == 0) {
      return (row >> 1) & 3;  // two rows, or one and a half, fill the banks
    } else {
      return (row >> 2) & 1;  // four rows take the even, or the odd, groups of banks
    }
  }
  static FLASHPLAN_DEVICE uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ permutation(row)) << 4));
  }
  /// From the address of chunk 0 of a row to that of `chunks` further on, or from that of chunk 1
  /// if `chunks` is even: one register serves all of a row, since tiles are aligned to the 128
  /// bytes that are permuted.
  static FLASHPLAN_DEVICE uint32_t advance(uint32_t address, int chunks) {
    constexpr int kPermuted = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    return (address ^ static_cast<uint32_t>(chunks % kPermuted << 4)) +
           static_cast<uint32_t>(chunks / kPermuted * kPermuted * 16);
  }
};

}  // namespace flashplan::device
