// SPDX-License-Identifier: Apache-2.0
// How a warp copies rows of 8-bit keys or values to shared memory, and there widens them to 16
// bits.
#pragma once

#include "kernels/device/element.h"
#include "kernels/device/sm90/producer_warp.h"

namespace flashplan::device {

/// Copies and widens a part of a tile, S::kPartRows rows. Raw 8-bit rows lie one after the other.
/// From 128 dims on, the halves of each 128 bytes of odd rows are exchanged, so that the eight
/// lanes that read 64 bytes of two neighbouring rows together have no bank conflicts. Their writes
/// have none either, since the chunks of neighbouring rows have different places in the layout that
/// wgmma reads.
template <typename S>
struct Sm90Widening {
  static_assert(S::kHeadDimQk == S::kHeadDimVo && S::kPartRows % 8 == 0 && S::kPartRows <= 32);
  static constexpr int kRowBytes = S::kHeadDimQk;
  static constexpr int kChunks = kRowBytes / 16;  // chunks of 16 dims in a row
  static_assert(kChunks == 4 || kChunks == 8 || kChunks == 16);

  static FLASHPLAN_DEVICE uint32_t place(int row, int chunk) {
    return row * kRowBytes + ((kChunks > 4 ? chunk ^ row % 2 * 4 : chunk) << 4);
  }

  /// Starts to copy rows; lane r gives the address of row r, if the part has so many rows. Rows
  /// before `begin` and from `end` on, and dims from `num_dims` on, become zeros.
  static FLASHPLAN_DEVICE void request(const AttentionParams& p, uint32_t to,
                                       const unsigned char* row, int begin, int end, int num_dims) {
    constexpr int kRowsAtOnce = 32 / kChunks;
    const int lane = opaque(static_cast<int>(threadIdx.x) % 32);
    const int chunk = lane % kChunks;
    const int num_bytes = min(max(num_dims - chunk * 16, 0), 16);
    if (!p.tensors.vectorized) {
#pragma unroll 1
      for (int r = lane / kChunks; r < S::kPartRows; r += kRowsAtOnce) {
        const unsigned char* const from = shuffled_pointer(row, r) + chunk * 16;
        copy_unaligned_16<1>(to + place(r, chunk), from, r >= begin && r < end ? num_bytes : 0);
      }
      return;
    }
#pragma unroll
    for (int first = 0; first < S::kPartRows; first += kRowsAtOnce) {
      const int r = first + lane / kChunks;
      const unsigned char* const from = shuffled_pointer(row, r) + chunk * 16;
      cp_async_16_padded(to + place(r, chunk), from, r >= begin && r < end ? num_bytes : 0);
    }
  }

  /// Widens rows from `raw` to `wide`, keys to the dtype of queries and values to that of weights.
  /// Both dtypes represent every 8-bit number exactly. `raw` may be the second half of `wide`.
  static FLASHPLAN_DEVICE void widen(bool is_key, uint32_t raw, uint32_t wide) {
    if (S::kQ == S::kWeight || !is_key) {
      widen_to<S::kWeight>(raw, wide);
    } else {
      widen_to<S::kQ>(raw, wide);
    }
  }

  /// Widens 8 elements, those of `low` and then those of `high`, to kTo, and writes them.
  template <DType kTo>
  static FLASHPLAN_DEVICE void store_8(uint32_t to, uint32_t low, uint32_t high) {
    const uint2 a = Element<S::kKv>::widen(low);
    const uint2 b = Element<S::kKv>::widen(high);
    store_shared_16(
        to, {converted<kTo>(a.x), converted<kTo>(a.y), converted<kTo>(b.x), converted<kTo>(b.y)});
  }

 private:
  static constexpr int kRowsAtOnce = 8;
  // Eight lanes widen 64 bytes of each of two rows, so the four groups of lanes widen eight rows.
  static constexpr int kQuarters = kChunks / 4;
  static constexpr int kItems = kRowsAtOnce / 8 * kQuarters;

  /// Converts two float16 to two elements of kTo.
  template <DType kTo>
  static FLASHPLAN_DEVICE uint32_t converted(uint32_t pair) {
    if constexpr (kTo == DType::kFloat16) {
      return pair;
    } else {
      const float2 values = Element<DType::kFloat16>::unpack(pair);
      return Element<kTo>::pack(values.x, values.y);
    }
  }
  template <DType kTo>
  static FLASHPLAN_DEVICE void widen_to(uint32_t raw, uint32_t wide) {
    const int lane = opaque(static_cast<int>(threadIdx.x) % 32);
    const int row = lane / 8 * 2 + lane % 8 / 4;
    const uint32_t from = raw + place(row, lane % 4);
    const uint32_t to = wide + S::Key::offset(row, lane % 4 * 2);
#pragma unroll 1
    for (int first = 0; first < S::kPartRows; first += kRowsAtOnce) {
      uint4 words[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        // The second 64 of each 128 dims lie 64 bytes behind the first or, in odd rows, before
        // them: XOR finds them in both cases.
        const uint32_t quarter = i % kQuarters * 64;
        words[i] = load_shared_16((from ^ quarter) + (first + i / kQuarters * 8) * kRowBytes);
      }
      __syncwarp();  // `wide` overlaps the bytes that were loaded
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const uint32_t chunk = to + i % kQuarters * S::Key::kBlockBytes +
                               (first + i / kQuarters * 8) / 8 * S::Key::kGroupBytes;
        store_8<kTo>(chunk, words[i].x, words[i].y);
        store_8<kTo>(chunk ^ 16, words[i].z, words[i].w);
      }
    }
  }
};

}  // namespace flashplan::device
