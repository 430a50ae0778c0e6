// SPDX-License-Identifier: Apache-2.0
// Rows in shared memory, laid out so that neither 16-byte writes nor ldmatrix meet bank conflicts.
#pragma once

#include "kernels/device/ptx.h"

namespace flashplan::device {

/// Rows of kRowBytes. The order of the 16-byte chunks in a row depends on the row's number, so that
/// chunk c of 8 consecutive rows lies in 8 different groups of banks.
template <int kRowBytes_>
struct SharedTile {
  static constexpr int kRowBytes = kRowBytes_;
  static constexpr int kChunks = kRowBytes / 16;
  static_assert(kRowBytes % 32 == 0);

  /// The number that a row's chunk numbers are XORed with.
  static FLASHPLAN_DEVICE int permutation(int row) {
    if constexpr (kChunks % 8 == 0) {
      return row & 7;
    } else if constexpr (kChunks % 4 == 0) {
      // Rows have an odd multiple of 64 bytes, so every second row begins at the same bank.
      return (row >> 1) & 3;
    } else {
      // Rows have an odd multiple of 32 bytes, so every fourth row begins at the same bank.
      return (row >> 2) & 1;
    }
  }
  static FLASHPLAN_DEVICE uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ permutation(row)) << 4));
  }
  /// Returns the address of the chunk that is `chunks` chunks after the chunk at `address`, in the
  /// same row. `address` must be that of chunk 0, or of chunk 1 if `chunks` is even. One register
  /// then serves all chunks of a row, since tiles are aligned to the 128 bytes within which chunks
  /// are permuted.
  static FLASHPLAN_DEVICE uint32_t advance(uint32_t address, int chunks) {
    constexpr int kPermuted = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    return (address ^ static_cast<uint32_t>(chunks % kPermuted << 4)) +
           static_cast<uint32_t>(chunks / kPermuted * kPermuted * 16);
  }
};

}  // namespace flashplan::device
