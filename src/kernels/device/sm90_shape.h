// SPDX-License-Identifier: Apache-2.0
// Sizes of the sm90 family, and the layout of its shared memory.
#pragma once

#include "kernels/device/kv_loader.h"
#include "kernels/device/numeric.h"
#include "kernels/device/row_block.h"
#include "kernels/device/wgmma.h"

namespace flashplan::device {

/// A work tile's records as all roles of the CTA see them.
struct Sm90Context {
  WorkTile tile;
  Segment segment;
  int32_t is_end;  // no tile: the queue ends here
  int32_t unused[3];

  FLASHPLAN_DEVICE RowBlock block(const AttentionParams& p) const {
    RowBlock block;
    block.assign(p, tile, segment);
    return block;
  }
  /// Whether keys are multiplied. A piece of a merge that has none left, since its request is
  /// shorter than planned, has one step of them all masked, which leaves the empty state.
  FLASHPLAN_DEVICE bool has_steps() const {
    return !is_end && (tile.kv_begin < tile.kv_end || tile.merge >= 0);
  }
  /// Where the real lengths are given.
  FLASHPLAN_DEVICE void fit_to_length(const AttentionParams& p, int32_t tile_kv) {
    const int32_t kv_len = p.tensors.kv_lens[request_of(tile, segment, p.tensors.pages)];
    KeySpan keys = {tile.kv_begin, tile.kv_end};
    flashplan::fit_to_length(p.mask, block(p).rows, p.schedule.group_size, tile_kv, kv_len, segment,
                             keys);
    tile.kv_begin = keys.begin;
    tile.kv_end = keys.end;
  }
};
static_assert(sizeof(Sm90Context) == 64);

/// `Choices`: Traits of shape.h.
template <typename Choices>
struct Sm90Shape : Choices {
  // Of consumers, with 64 rows each. Three leave 160 registers to a thread, which is enough for 64
  // dims: there the softmax takes more time than the products, and a third one hides more of it.
  static constexpr int kWarpgroups = Choices::kHeadDimVo <= 64 ? 3 : 2;
  static constexpr int kTileQ = 64 * kWarpgroups;
  // 256 dims leave room for four slots of 80 keys.
  static constexpr int kTileKv = Choices::kHeadDimVo > 128 ? 80 : 128;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 232;

  // Named barriers: of the warpgroups' turns, and of a warpgroup's own threads.
  static constexpr int kTurnBarrier = 1;
  static constexpr int kOwnBarrier = kTurnBarrier + kWarpgroups;

  /// Rows of a work tile: number 0 and 1 of a consumer thread, whose warpgroup has 64 rows from
  /// `first` on.
  static FLASHPLAN_DEVICE int row(int first, int thread, int half) {
    return first + thread / 32 * 16 + half * 8 + thread % 32 / 4;
  }

  using Query = WgmmaTile<Choices::kHeadDimQk, kTileQ>;
  using Key = WgmmaTile<Choices::kHeadDimQk, 8>;
  using Value = WgmmaTile<Choices::kHeadDimVo, 8>;
  static_assert(Choices::kHeadDimVo <= Choices::kHeadDimQk);  // output passes through the queries
  static constexpr int kQBytes = Query::bytes(kTileQ);
  static constexpr int kKeyBytes = Key::bytes(kTileKv);
  static constexpr int kValueBytes = Value::bytes(kTileKv);
  static constexpr int kSlotBytes = kKeyBytes > kValueBytes ? kKeyBytes : kValueBytes;

  static constexpr int kContexts = 4;
  static constexpr int kQBuffers = Choices::kHeadDimQk > 128 ? 1 : 2;
  // Keys and values take turns in a ring of slots.
  static constexpr int kHeaderBytes = 1024;
  static constexpr int kBudget = 227 * 1024 - kHeaderBytes;
  static constexpr int kMostSlots = (kBudget - kQBuffers * kQBytes) / kSlotBytes;
  static constexpr int kSlots = kMostSlots < 8 ? kMostSlots : 8;
  static_assert(kSlots >= 3);
  // Two warps fill slots in turn. A warp knows the phase of a slot by its parity alone, so it must
  // not fall two behind: with three slots it could.
  static constexpr int kKvWarps = kSlots > 3 ? 2 : 1;

  // Offsets in shared memory: barriers and contexts, then tiles.
  static constexpr int kSlotFull = 0;
  static constexpr int kSlotEmpty = kSlotFull + 8 * 8;
  static constexpr int kQFull = kSlotEmpty + 8 * 8;
  static constexpr int kQEmpty = kQFull + 2 * 8;
  static constexpr int kContextFull = kQEmpty + 2 * 8;
  static constexpr int kContextEmpty = kContextFull + kContexts * 8;
  static constexpr int kTailFull = kContextEmpty + kContexts * 8;
  static constexpr int kIsLast = kTailFull + 2 * 8;
  static constexpr int kContext = 512;
  static constexpr int kPageIds = kContext + kContexts * 64;  // of each lane of two warps
  static constexpr int kQuery = kHeaderBytes;
  static constexpr int kFirstSlot = kQuery + kQBuffers * kQBytes;
  static constexpr int kSmemBytes = kFirstSlot + kSlots * kSlotBytes;
  static_assert(kIsLast + 16 <= kContext);
  static_assert(kPageIds + 2 * 32 * 4 <= kHeaderBytes);
};

}  // namespace flashplan::device
