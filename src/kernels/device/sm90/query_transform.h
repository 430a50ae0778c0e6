// SPDX-License-Identifier: Apache-2.0
// Applies a variant to queries in shared memory, from where wgmma reads them in the sm90 family.
#pragma once

#include "kernels/device/row_block.h"
#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/shape.h"
#include "kernels/device/variant.h"

namespace flashplan::device {

/// Applies the variant's `query` to 16 rows of one head, from row `first_row` of the tile on. They
/// are in shared memory at `queries`. All lanes of a warp call it.
template <typename S>
FLASHPLAN_DEVICE void transform_16_queries(const AttentionParams& p, const RowBlock& block,
                                           int32_t kv_head, int first_row, uint32_t queries,
                                           int lane) {
  constexpr int kChunks = S::kHeadDimQk / 8;  // 16-byte chunks of a row
  const typename S::Variant variant(p);
#pragma unroll 1
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int r = i / kChunks;
    const int chunk = i % kChunks;
    const uint32_t address =
        queries + chunk / 8 * S::Query::kBlockBytes + r * 128 + ((chunk ^ r) % 8 << 4);
    const ElementPosition at =
        element_position(p, block.rows, block.position, kv_head, first_row + r, chunk * 8);
    uint4 pairs = load_shared_16(address);
    const auto pair = [&](uint32_t pair, int first) {
      return transformed<S::kQ>(pair, [&](float x, int j) {
        // Zeros past the last dim stay zeros.
        const ElementPosition of_x = at.next(first + j);
        return of_x.dim < p.tensors.head_dim_qk ? variant.query(x, of_x) : x;
      });
    };
    pairs = {pair(pairs.x, 0), pair(pairs.y, 2), pair(pairs.z, 4), pair(pairs.w, 6)};
    store_shared_16(address, pairs);
  }
}

}  // namespace flashplan::device
