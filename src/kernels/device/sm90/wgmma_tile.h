// SPDX-License-Identifier: Apache-2.0
// The shared memory that Hopper's matrix products read.
#pragma once

#include "abi/host_device.h"
#include "kernels/device/ptx.h"

namespace flashplan::device {

/// The descriptor of an operand in shared memory.
struct WgmmaOperand {
  uint32_t low;  // has the operand's address; adding a step (step_of_dims() ...) moves it
  uint32_t high;

  FLASHPLAN_DEVICE WgmmaOperand operator+(uint32_t step) const { return {low + step, high}; }
  FLASHPLAN_DEVICE uint64_t bits() const { return static_cast<uint64_t>(high) << 32 | low; }
};

/// Rows of kDims 16-bit elements in shared memory, in the layout that wgmma reads and tensor maps
/// write: blocks of kBlockRows rows by 64 dims, swizzled by 128 bytes. After a block come the
/// blocks of the other dims of its rows, then those of the next rows.
template <int kDims, int kBlockRows>
struct WgmmaTile {
  static_assert(kDims % 64 == 0 && kBlockRows % 8 == 0);
  static constexpr int kBlockBytes = kBlockRows * 128;
  static constexpr int kBlocks = kDims / 64;
  // The distance from 8 rows to the next 8.
  static constexpr int kGroupBytes = kBlockRows == 8 ? kBlocks * kBlockBytes : 1024;
  FLASHPLAN_HOST_DEVICE static constexpr int bytes(int rows) { return rows * kDims * 2; }

  /// The offset, in bytes, of chunk number `chunk` of a row; a chunk has 8 dims.
  static FLASHPLAN_DEVICE uint32_t offset(int row, int chunk) {
    return row / kBlockRows * kBlocks * kBlockBytes + chunk / 8 * kBlockBytes +
           row % kBlockRows * 128 + ((chunk ^ row) % 8 << 4);
  }

  /// Describes rows (of one block, or of blocks of 8 rows) as an operand whose dims are summed
  /// over. Adding step_of_dims(k) moves it by 16 * k dims.
  static FLASHPLAN_DEVICE WgmmaOperand by_dims(uint32_t tile) {
    return descriptor(tile, 1, kGroupBytes);
  }
  static FLASHPLAN_DEVICE uint32_t step_of_dims(int k) {
    return (k / 4 * kBlockBytes + k % 4 * 32) >> 4;
  }
  /// Describes rows as an operand whose rows are summed over. Adding step_of_rows(k) moves it by
  /// 16 * k rows.
  static FLASHPLAN_DEVICE WgmmaOperand by_rows(uint32_t tile) {
    return descriptor(tile, kBlockBytes, kGroupBytes);
  }
  static FLASHPLAN_DEVICE uint32_t step_of_rows(int k) { return (k * 2 * kGroupBytes) >> 4; }
  /// Adding this to an operand moves the operand by `k` blocks of 64 dims.
  static FLASHPLAN_DEVICE uint32_t step_of_blocks(int k) { return (k * kBlockBytes) >> 4; }

 private:
  static constexpr uint32_t kSwizzle128 = uint32_t{1} << 30;

  static FLASHPLAN_DEVICE WgmmaOperand descriptor(uint32_t address, int leading, int stride) {
    return {static_cast<uint32_t>(leading >> 4) << 16 | address >> 4,
            kSwizzle128 | static_cast<uint32_t>(stride >> 4)};
  }
};

}  // namespace flashplan::device
