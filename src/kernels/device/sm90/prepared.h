// SPDX-License-Identifier: Apache-2.0
// What the warps that prepare keys and values (abi/prepared_kv.h) share with those that read them.
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/shared_memory.h"

namespace flashplan::device {

template <typename S>
struct Sm90Prepared {
  /// The number of parts of a tile of one kv head. One warp prepares a part: its keys, then its
  /// values.
  static constexpr int kParts = S::kTileKv / S::kPartRows;

  /// Waits for the record of the queue's first work tile, and returns whether it says that keys are
  /// prepared.
  static FLASHPLAN_DEVICE bool is_in_use(const AttentionParams& p, const Sm90Smem<S>& smem) {
    if (p.prepared.states == nullptr) return false;
    mbarrier_wait(smem.context_full(0), 0);
    return static_cast<int32_t>(load_shared_4(smem.first_prepared(0))) >= 0;
  }
  static FLASHPLAN_DEVICE PreparedState* state(const AttentionParams& p, int32_t tile,
                                               int32_t head) {
    return p.prepared.states + int64_t{tile} * p.prepared.num_kv_heads + head;
  }
  /// Calls leave() if the plan may have prepared tiles.
  static FLASHPLAN_DEVICE void leave_if_used(const AttentionParams& p) {
    if (p.prepared.states != nullptr) leave(p);
  }
  /// Each warp that prepares or reads tiles calls this when it needs their states no more. The last
  /// such warp of all CTAs sets the states to zero for the next run.
  static FLASHPLAN_DEVICE void leave(const AttentionParams& p) {
    const int32_t num_states = *p.prepared.num_tiles * p.prepared.num_kv_heads;
    if (num_states == 0) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int32_t before = 0;
    __syncwarp();
    if (lane == 0) before = arrive(p.prepared.num_left);
    before = __shfl_sync(0xffffffffU, before, 0);
    __syncwarp();
    if (before + 1 != S::kPreparedWarps * static_cast<int32_t>(gridDim.x)) return;
#pragma unroll 1
    for (int32_t i = lane; i < num_states; i += 32) p.prepared.states[i] = {};
    if (lane == 0) *p.prepared.num_left = 0;
  }
};

/// The prepared tiles [begin, end) of a segment, which hold the keys of a work tile. The first key
/// of the work tile is always the first key of tile `begin`, because plans with windows or key
/// ranges, where it could lie inside a tile, do not prepare keys.
template <typename S>
struct Sm90PreparedRange {
  int32_t begin = 0;
  int32_t end = 1;  // a work tile without keys still has a step, which reads any tile

  FLASHPLAN_DEVICE explicit Sm90PreparedRange(const WorkTile& tile) {
    if (tile.kv_begin >= tile.kv_end) return;
    begin = tile.kv_begin / S::kTileKv;
    end = (tile.kv_end + S::kTileKv - 1) / S::kTileKv;
  }
};

}  // namespace flashplan::device
