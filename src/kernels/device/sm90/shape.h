// SPDX-License-Identifier: Apache-2.0
// Sizes of the sm90 family, and the record of a work tile.
#pragma once

#include "abi/begin_tile.h"
#include "kernels/device/numeric.h"
#include "kernels/device/pages.h"
#include "kernels/device/sm90/wgmma.h"

namespace flashplan::device {

/// The record of a work tile and of its segment in shared memory, where producer and consumers read
/// it.
struct Sm90Context {
  WorkTile tile;
  Segment segment;
  int32_t is_end;            // 1: there is no tile, because the queue ends here
  int32_t first_masked_key;  // the first key that the caller's mask of bits covers
  int32_t row_begin;         // first row of the tile among the packed rows of the segment
  int32_t num_rows;

  /// The rows and keys of the tile, after finish().
  FLASHPLAN_DEVICE RowBlock block() const {
    return {{tile.segment, segment.qo_begin, row_begin, num_rows},
            segment.kv_row,
            segment.position,
            {tile.kv_begin, tile.kv_end}};
  }
  /// Whether the tile has steps over keys. Where the real length leaves a tile of a merge without
  /// keys, it still has one step, whose keys are all masked: this writes the empty state that the
  /// merge waits for.
  FLASHPLAN_DEVICE bool has_steps() const {
    // There are no branches, so that all words are loaded at once.
    const auto is_tile = static_cast<unsigned>(is_end == 0);
    return (is_tile & (static_cast<unsigned>(tile.kv_begin < tile.kv_end) |
                       static_cast<unsigned>(tile.merge >= 0))) != 0;
  }
  /// The steps of each kv head. The tile must have steps.
  FLASHPLAN_DEVICE int32_t num_steps(int32_t tile_kv) const {
    return max((tile.kv_end - tile.kv_begin + tile_kv - 1) / tile_kv, 1);
  }
  /// Adds to the record the rows of the tile, and fits its keys and positions to the lengths, page
  /// table and mask that only the tensors of this run have.
  FLASHPLAN_DEVICE void finish(const AttentionParams& p, int32_t tile_kv) {
    const BegunTile begun = begin_tile(p, tile_kv, tile, segment);
    row_begin = begun.rows.row_begin;
    num_rows = begun.rows.num_rows;
    segment.position = begun.position;
    tile.kv_begin = begun.keys.begin;
    tile.kv_end = begun.keys.end;
    first_masked_key = begun.first_masked_key;
  }
};
static_assert(sizeof(Sm90Context) == 64);

/// The sizes of a kernel that is compiled for `Choices` (device/traits.h).
template <typename Choices>
struct Sm90Shape : Choices {
  // There are two or three consumer warpgroups, each with 64 rows. With three, a thread has 152
  // registers, which is enough for 64 dims and 96 keys. With 64 dims the softmax takes longer than
  // the products, and the third warpgroup overlaps more of it. A warpgroup that rotates, gathers or
  // widens takes the registers of the third.
  static constexpr bool kRotates = Choices::Variant::kRotates;
  static constexpr bool kGathers = Choices::kGathers;
  static_assert(!(kRotates && kGathers));
  // Whether keys and values have 8 bits in memory. In shared memory they then get the dtypes of
  // queries and weights.
  static constexpr bool kWidens = Element<Choices::kKv>::kBytes == 1;
  // Beside keys of e4m3, queries of bfloat16 kernels may have 8 bits in memory, too: bfloat16 has
  // all numbers of e4m3, so they are widened exactly.
  static constexpr bool kTakesNarrowQueries =
      Choices::kKv == DType::kFloat8E4M3 && Choices::kQuery == DType::kBFloat16;
  static constexpr bool kHelps = kRotates || kGathers || kWidens;  // a warpgroup helps the producer
  // Beside a warpgroup that helps, the consumers have too few registers for more than 128 dims,
  // except with the shorter steps of 8-bit keys.
  static_assert(!kHelps || kWidens || Choices::kHeadDimVo <= 128);
  static constexpr int kWarpgroups = Choices::kHeadDimVo <= 64 && !kHelps ? 3 : 2;
  static constexpr int kTileQ = 64 * kWarpgroups;
  static constexpr bool kIsWide = Choices::kHeadDimVo > 128;
  // 256 dims leave room for four slots of 80 keys, or of 64 keys beside the rows that are widened.
  static constexpr int kTileKv = kIsWide ? kWidens ? 64 : 80 : kWarpgroups == 3 ? 96 : 128;
  static constexpr int kThreads = 128 * (kWarpgroups + (kHelps ? 2 : 1));
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  // Registers of a thread. The consumers get as few as their loop over keys needs to keep its
  // values in registers; with 256 dims it loads four values from local memory in each step. The
  // producer gets the rest. What the producer spills to local memory is slow to come back while all
  // CTAs request their first keys: with 56 registers, the first keys of some prompts were requested
  // 4,000 clocks later than with 72. Code that gathers must not spill with its 40 registers: to
  // store a page id in local memory, a warp would wait until the id has arrived.
  static constexpr int kProducerRegisters = kHelps ? 40 : kWarpgroups == 3 || kIsWide ? 56 : 72;
  static constexpr int kConsumerRegisters = kRotates           ? 200
                                            : kGathers         ? 216
                                            : kWidens          ? 208
                                            : kWarpgroups == 3 ? 152
                                            : kIsWide          ? 224
                                                               : 216;
  static constexpr int kRotatorRegisters = 72;
  static constexpr int kWidenerRegisters = 56;
  static constexpr int kHelperRegisters = kRotates   ? kRotatorRegisters
                                          : kWidens  ? kWidenerRegisters
                                          : kGathers ? kProducerRegisters
                                                     : 0;
  // A CTA owns the registers that it was launched with, the same number for each thread and a
  // multiple of 8. setmaxnreg would wait forever for registers that the CTA does not have.
  static_assert(kWarpgroups * kConsumerRegisters + kProducerRegisters + kHelperRegisters <=
                kThreads / 128 * (65536 / kThreads / 8 * 8));

  // Named barriers: one for the turn of each consumer warpgroup, one for the threads of each
  // consumer warpgroup, one for those of the warpgroup that rotates, and one for those of all
  // consumers.
  static constexpr int kTurnBarrier = 1;
  static constexpr int kOwnBarrier = kTurnBarrier + kWarpgroups;
  static constexpr int kRotatorBarrier = kOwnBarrier + kWarpgroups;
  static constexpr int kConsumerBarrier = kRotatorBarrier + 1;

  /// The row, in the work tile, of a consumer thread's accumulators: each thread has two rows
  /// (`half` 0 and 1). `first` is the first of the 64 rows of its warpgroup.
  static FLASHPLAN_DEVICE int row(int first, int thread, int half) {
    return first + thread / 32 * 16 + half * 8 + thread % 32 / 4;
  }

  using Query = WgmmaTile<Choices::kHeadDimQk, kTileQ>;
  // Keys whose dims are in two tensors are ragged. Their blocks of 64 dims have all rows of a step,
  // so that one box brings a block from the tensor that has these dims.
  using Key = WgmmaTile<Choices::kHeadDimQk, Choices::kHasKeyTail ? kTileKv : 8>;
  using Value = WgmmaTile<Choices::kHeadDimVo, 8>;
  // The output is staged in the memory of the queries.
  static_assert(Choices::kHeadDimVo <= Choices::kHeadDimQk);
  static constexpr int kQBytes = Query::bytes(kTileQ);
  static constexpr int kKeyBytes = Key::bytes(kTileKv);
  static constexpr int kValueBytes = Value::bytes(kTileKv);
  static constexpr int kSlotBytes = kKeyBytes > kValueBytes ? kKeyBytes : kValueBytes;

  static constexpr int kContexts = 8;
  static constexpr int kQBuffers = Choices::kHeadDimQk > 128 ? 1 : 2;
  // A work tile of up to 64 rows takes only one part of a buffer, so that the queries of several
  // such tiles are loaded ahead.
  static constexpr int kQParts = kQBuffers > 1 ? kWarpgroups : 1;
  static constexpr int kQBarriers = kQBuffers * kQParts;
  // Room for the members of Sm90SharedMemory that come before the queries.
  static constexpr int kHeaderBytes = 2048;
  // Keys and values take turns in a ring of slots. Where keys are larger than values, both have
  // rings of their own, with slots of their size, so that there is room for one slot more.
  static constexpr bool kHasTwoRings = kKeyBytes > kValueBytes && !kGathers && !kWidens;
  static constexpr int kBudget = 227 * 1024 - kHeaderBytes;
  // Warps that widen always need room for a part of a tile each, so the ring can not use this room.
  static constexpr int kReservedBytes = kWidens ? kSlotBytes : 0;
  static constexpr int kRoom = kBudget - kQBuffers * kQBytes - kReservedBytes;
  static constexpr int kMostSlots =
      kHasTwoRings ? kRoom / (kKeyBytes + kValueBytes) * 2 : kRoom / kSlotBytes;
  static constexpr int kSlots = kMostSlots < 8 ? kMostSlots : 8;
  static constexpr int kRingBytes =
      kHasTwoRings ? kSlots / 2 * (kKeyBytes + kValueBytes) : kSlots * kSlotBytes;
  // One warp fills slots with keys, another one with values, and both wait for free slots by
  // parity. With three slots of one ring each warp would fill every other round of a slot, so the
  // parity that it waits for could be that of the round before.
  static constexpr int kKvWarps = 2;
  static_assert(kSlots > 3);
  // Warps that gather: two of the producer, and a warpgroup of their own.
  static constexpr int kGatherWarps = 6;
  // Keys that are rotated, and keys and values from small pages or of 8 bits, may be prepared:
  // written to the workspace once for many work tiles (Sm90Preparer). Then one warp copies the keys
  // from there, and another one the values.
  static constexpr bool kTakesPreparedValues = kGathers || kWidens;
  static constexpr bool kTakesPrepared = kHelps && !kHasTwoRings;
  static constexpr int kPreparingWarps = 4;
  // Warps that read records to load keys and values.
  static constexpr int kKvReaders = kGathers  ? kGatherWarps
                                    : kWidens ? kKvWarps + kPreparingWarps
                                              : kKvWarps;
  // Arrivals at the `full` barrier of a slot.
  static constexpr int kSlotArrivals = kGathers ? kGatherWarps * 32 : kWidens ? kPreparingWarps : 1;
  // Warps that call Sm90Prepared::leave(): they prepare tiles, or copy them to slots.
  static constexpr int kPreparedWarps = kPreparingWarps + (kTakesPreparedValues ? 2 : 1);
  // Each warp that prepares has room for a part of a tile. Where the slots leave no room, it is in
  // the last slot, which the ring does not use while keys are prepared.
  static constexpr int kPartRows = kWidens ? kTileKv / kPreparingWarps : 32;
  static constexpr int kPartBytes = Key::bytes(kPartRows);
  static constexpr int kStageBytes = kTakesPrepared ? kPreparingWarps * kPartBytes : 0;
  static constexpr bool kStagesInSlot = kQBuffers * kQBytes + kRingBytes + kStageBytes > kBudget;
  static_assert(!kStagesInSlot || kStageBytes <= kSlotBytes);
  static constexpr int kPreparedSlots = kSlots - (kStagesInSlot ? 1 : 0);
  // Bytes of the ring that merges may use.
  static constexpr int kMergeBytes = kRingBytes - (kStagesInSlot ? kSlotBytes : 0);
  // Two warps fill the slots in turn, which takes more than three slots (see kSlots above).
  static_assert(!kTakesPrepared || kPreparedSlots > 3);
};

}  // namespace flashplan::device
