// SPDX-License-Identifier: Apache-2.0
// The current work tile of a CTA, and which rows, keys and dims of it each warp computes.
#pragma once

#include "abi/begin_tile.h"
#include "kernels/device/merge_part.h"
#include "kernels/device/sm80/shape.h"

namespace flashplan::device {

/// The current work tile. It is kept in shared memory, because accumulators need the registers.
struct TileContext {
  WorkTile tile;
  int32_t chunk_kv;  // keys of one state; without batch_invariant larger than any length
  // `block` begins at an odd 32-bit word. At an even one nvcc would load its fields in pairs, and
  // spill registers for head dim 256.
  RowBlock block;
  int32_t first_seen;        // the first key that any row sees
  int32_t first_masked_key;  // the first key that the caller's mask of bits covers
  int32_t on_pages;          // kAllOnPages or kSomeOffPages
  const int32_t* page_ids;   // page ids of the segment; null for ragged keys
  // If tile.merge >= 0: the record of the first head's merge, which is loaded with the first keys.
  Merge merge;
  uint32_t is_last;  // a bit for each of up to 32 merges: this CTA was the last to arrive
  MergePart part;    // the rows of `merge` that this CTA has to merge
  bool is_final;     // the queue ends with this tile

  FLASHPLAN_DEVICE int32_t heads_end() const { return tile.kv_head + tile.num_kv_heads; }
  /// Loads on_pages anew, because loaders may change it while other warps wait for the keys.
  FLASHPLAN_DEVICE int32_t load_on_pages() const {
    return static_cast<int32_t>(load_shared_4(shared_address(&on_pages)));
  }

  /// Makes `work_tile` the current one. `tile_kv` is the number of keys of a step. Real lengths
  /// change `block`; `tile` keeps the keys that were planned.
  FLASHPLAN_DEVICE void assign(const AttentionParams& p, int32_t tile_kv, const WorkTile& work_tile,
                               const Segment& segment, bool ends_queue) {
    tile = work_tile;
    is_final = ends_queue;
    const BegunTile begun = begin_tile(p, tile_kv, work_tile, segment);
    block = {begun.rows, segment.kv_row, begun.position, begun.keys};
    first_seen = block.first_seen(p);
    first_masked_key = begun.first_masked_key;
    on_pages = kAllOnPages;
    page_ids = device::page_ids(p.tensors.pages, segment.kv_row);
    chunk_kv = p.schedule.chunk_kv > 0 ? p.schedule.chunk_kv : 0x7fffffff;
  }
};

#ifndef __CUDACC_RTC__  // NVRTC 13.2 has no offsetof
static_assert(__builtin_offsetof(TileContext, merge) % 8 == 0);
static_assert(__builtin_offsetof(TileContext, block) % 8 == 4);
#endif

/// Starts to load what the merge at the end of a tile needs: its record into `context`, its counter
/// and the first log-sum-exp into the L2 cache.
FLASHPLAN_DEVICE void prepare_merge(const AttentionParams& p, TileContext& context, int thread) {
  constexpr int kWords = sizeof(Merge) / 8;
  if (thread < kWords) {
    const auto* merge =
        reinterpret_cast<const unsigned char*>(p.schedule.merges + context.tile.merge);
    cp_async_8(shared_address(&context.merge) + thread * 8, merge + thread * 8);
  } else if (thread == kWords) {
    prefetch_l2(p.schedule.arrivals + context.tile.merge);
  } else if (thread == kWords + 1) {
    prefetch_l2(p.workspace.partial_lse + context.tile.partial_row);
  }
}

/// The rows, keys and dims of a tile that a warp computes.
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
        warp_kv(S::kOtherWarps == 1 ? 0 : (thread >> 5) / (S::kWarpsQ * S::kWarpsVo)),
        warp_vo(S::kWarpsVo == 1 ? 0 : (thread >> 5) % S::kWarpsVo),
        computes(S::kOtherWarps == S::kWarpsKv || warp_kv < S::kWarpsKv) {}

  FLASHPLAN_DEVICE int first_dim() const { return warp_vo * S::kDimsVo; }
  FLASHPLAN_DEVICE int first_row() const { return warp_q * S::kMmaM * 16; }
  /// This lane's row of the accumulators of an mma: `m` counts the warp's groups of 16 rows, `half`
  /// the two halves of a group.
  FLASHPLAN_DEVICE int row(int m, int half) const {
    return first_row() + m * 16 + half * 8 + lane / 4;
  }
};

}  // namespace flashplan::device
