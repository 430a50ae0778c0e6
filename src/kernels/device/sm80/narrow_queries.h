// SPDX-License-Identifier: Apache-2.0
// 8-bit queries. In work tiles of many rows, each row is copied to the upper half of the memory
// that it takes as float16, and is widened in place, once for all keys.
#pragma once

#include "abi/params.h"
#include "kernels/device/element.h"
#include "kernels/device/sm80/shared_tile.h"
#include "kernels/device/unaligned_copy.h"

namespace flashplan::device {

/// has_head_scales() says whether logits are multiplied by a scale of their kv head, and
/// head_scale() gives this scale. Kernels for 16-bit queries do not read scales of queries.
template <typename T>
FLASHPLAN_DEVICE bool has_head_scales(const AttentionParams& p) {
  return p.variant.k_scales.data != nullptr || (T::kWidensQueries && p.q_scales.data != nullptr);
}
template <typename T>
FLASHPLAN_DEVICE float head_scale(const AttentionParams& p, int32_t kv_head) {
  return T::kWidensQueries ? p.head_scale(kv_head) : p.variant.k_scales.of(kv_head);
}

/// Starts a warp's copies of kRows rows of 8-bit queries to the upper halves of the float16 rows at
/// `tile`. All lanes call row_address(row) together, because it may shuffle. Dims beyond `head_dim`
/// become zeros.
template <int kHeadDim, int kRows, typename RowAddress>
FLASHPLAN_DEVICE void copy_narrow_queries(uint32_t tile, int head_dim, bool vectorized, int lane,
                                          RowAddress row_address) {
  using Tile = SharedTile<kHeadDim * 2>;
  constexpr int kChunks = kHeadDim / 16;
  static_assert(kRows * kChunks % 32 == 0);
#pragma unroll 4
  for (int i = lane; i < kRows * kChunks; i += 32) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const unsigned char* from = row_address(row) + chunk * 16;
    const int num_valid = head_dim - chunk * 16;
    const uint32_t to = tile + Tile::offset(row, kChunks + chunk);
    if (vectorized && num_valid > 0) {
      cp_async_16(to, from);
    } else {
      copy_unaligned_16<1>(to, from, num_valid);
    }
  }
}

/// Widens the kRows rows of queries from `first_row` on, which copy_narrow_queries() has brought,
/// and puts their dims into the order of permute_query_dims(). Rows are widened from their first
/// dims on, so that no lane overwrites bytes that are not read yet.
template <DType kQuery, int kHeadDim, int kRows>
FLASHPLAN_DEVICE void widen_query_dims(uint32_t q_tile, int first_row, int lane) {
  using Tile = SharedTile<kHeadDim * 2>;
  constexpr int kChunks = kHeadDim / 16;
  static_assert(kRows * kChunks % 32 == 0);
#pragma unroll 2
  for (int i = lane; i < kRows * kChunks; i += 32) {
    const int row = first_row + i % kRows;
    const int chunk = i / kRows;
    const uint4 narrow = load_shared_16(q_tile + Tile::offset(row, kChunks + chunk));
    const uint2 a = Element<kQuery>::widen(narrow.x);
    const uint2 b = Element<kQuery>::widen(narrow.y);
    const uint2 c = Element<kQuery>::widen(narrow.z);
    const uint2 d = Element<kQuery>::widen(narrow.w);
    __syncwarp();
    store_shared_16(q_tile + Tile::offset(row, 2 * chunk), {a.x, b.x, c.x, d.x});
    store_shared_16(q_tile + Tile::offset(row, 2 * chunk + 1), {a.y, b.y, c.y, d.y});
  }
}

}  // namespace flashplan::device
