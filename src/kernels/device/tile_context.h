// SPDX-License-Identifier: Apache-2.0
// What the threads of a CTA know of the work tile they are at.
#pragma once

#include "kernels/device/shape.h"

namespace flashplan::device {

/// A work tile as all threads see it, in shared memory: registers are for accumulators.
struct TileContext {
  WorkTile tile;
  RowBlock rows;
  const int32_t* page_ids;  // of the request; null: ragged
  SplitTile split;          // if it is one; there once the first keys are
  int32_t chunk_kv;         // keys of a state; no fewer than there are: one state
  int32_t is_last;          // whether this CTA is the last of a split to arrive

  FLASHPLAN_DEVICE int32_t heads_end() const { return tile.kv_head + tile.num_kv_heads; }

  FLASHPLAN_DEVICE void assign(const AttentionParams& p, const WorkTile& work_tile,
                               const RequestInfo& request) {
    tile = work_tile;
    rows.assign(p, work_tile, request);
    page_ids = device::page_ids(p.tensors.pages, work_tile.request);
    chunk_kv = p.schedule.chunk_kv > 0 ? p.schedule.chunk_kv : 0x7fffffff;
  }
};

static_assert(sizeof(TileContext) <= 128 && __builtin_offsetof(TileContext, split) % 8 == 0);

/// Which rows, keys and dims of a tile a warp has.
template <typename S>
struct WarpPlace {
  int lane;
  int warp_q;
  int warp_kv;
  int warp_vo;
  bool computes;

  explicit FLASHPLAN_DEVICE WarpPlace(int thread)
      : lane(thread & 31),
        warp_q(S::kWarpsQ == 1       ? 0
               : S::kOtherWarps == 1 ? (thread >> 5) / S::kWarpsVo
                                     : (thread >> 5) % S::kWarpsQ),
        warp_kv(S::kOtherWarps == 1 ? 0 : (thread >> 5) / S::kWarpsQ),
        warp_vo(S::kWarpsVo == 1 ? 0 : (thread >> 5) % S::kWarpsVo),
        computes(S::kOtherWarps == S::kWarpsKv || warp_kv < S::kWarpsKv) {}

  FLASHPLAN_DEVICE int first_dim() const { return warp_vo * S::kDimsVo; }
  FLASHPLAN_DEVICE int first_row() const { return warp_q * S::kMmaM * 16; }
  /// This lane's row of half a matrix tile.
  FLASHPLAN_DEVICE int row(int m, int half) const {
    return first_row() + m * 16 + half * 8 + lane / 4;
  }
};

}  // namespace flashplan::device
