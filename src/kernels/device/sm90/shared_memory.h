// SPDX-License-Identifier: Apache-2.0
// What a CTA of the sm90 family keeps in shared memory.
#pragma once

#include "kernels/device/offset_of.h"
#include "kernels/device/sm90/shape.h"

namespace flashplan::device {

using MbarrierWord = uint64_t;

/// The requests that a CTA merges after its queue (Sm90ReaderMerges).
struct Sm90Readers {
  static constexpr int kMost = 64;

  int32_t count;          // how many were added to the list, which has no room for more than kMost
  int32_t has_complete;   // 1: this CTA has set counters of requests to kComplete
  int32_t num_listed[2];  // requests to merge in a round; [0]: in even rounds, [1]: in odd rounds
  int32_t merges[kMost];  // the list: numbers of the merges
};

/// Rows that a warpgroup has to merge after the queue has ended, by Sm90Merge::merge_waiting():
/// part number part_index, of part_count equal parts, of the rows of merge number `merge`.
struct alignas(16) Sm90WaitingMerge {
  int32_t part_index;
  int32_t part_count;
  int32_t merge;
  uint32_t first_row;  // first row of the warpgroup, and the bit Sm90Merge::kManyRows
};
/// The waiting merges of a warpgroup.
struct alignas(16) Sm90WaitingMerges {
  int32_t count;
  int32_t is_last;  // whether the warpgroup was the last to arrive at a prefix
  Sm90WaitingMerge merges[kMostSplitsPerQueue];
};

/// Barriers, records and lists, then tiles. Slots (with keys or values), contexts (records of work
/// tiles) and parts of the memory of queries are rings: each entry has an mbarrier that says that
/// it is full, and one that says that it is empty.
///
///   1. An entry is written only after its phase of `empty` is complete, and read only after that
///      of `full`. Who writes arrives at `full`, or lets bulk copies count for it; who reads
///      arrives at `empty`.
///   2. Phases are told apart by parity, so nobody may fall two phases behind. Consumers wait for
///      every slot, those of another warpgroup's tile included, and free slots in their order.
///   3. Slots: the keys of a step come before the values of the step before, over all heads and
///      tiles of the queue. Producer warps, or warps that gather, write them. Keys to be rotated
///      are announced at `key_loaded`, and the warps that rotate them announce them at `slot_full`.
///      Every consumer warp frees every slot. Where keys have 8 bits, warps that widen write the
///      slots of some work tiles, and warps that copy prepared keys and values write the slots of
///      the other tiles. A warp cannot tell from parity how far the other kind of warps has come;
///      `free_position` says it (Sm90RingPosition).
///   4. Contexts: the record of work tile i is in entry i % kContexts, and behind the last tile
///      is a record with is_end. Warp 2 of the producer writes records. Consumers, and warps that
///      load, prepare or rotate, read each record and free it.
///   5. Queries: a tile of up to 64 rows takes a part of a buffer, any other tile a whole buffer,
///      and the parts that are left over before it are announced and freed without being filled.
///      Warps 2 and 3 of the producer write queries. Queries to be rotated pass through `q_loaded`,
///      as keys do. Consumers stage results in the memory of queries, and free it when the results
///      have been read from there.
///   6. `readers`, `waiting` and `states_full` belong to the consumers. So do the slots after the
///      last tile, behind a barrier of all consumers.
///   7. Whoever loads keys may set `on_pages` to kSomeOffPages, before it announces the keys. The
///      word keeps this value until the kernel ends.
template <typename S>
struct alignas(1024) Sm90SharedMemory {
  static constexpr int kIdsOfBatch = 32;

  MbarrierWord slot_full[S::kSlots];
  MbarrierWord slot_empty[S::kSlots];
  MbarrierWord q_full[S::kQBarriers];
  MbarrierWord q_empty[S::kQBarriers];
  MbarrierWord context_full[S::kContexts];
  MbarrierWord context_empty[S::kContexts];
  // For each loading warp: the last values of a tile have arrived, and zeros may replace the rows
  // past the last key.
  MbarrierWord tail_full[2];
  // Where keys and queries are rotated, these barriers announce to the rotator that they are
  // loaded; slot_full and q_full then announce that they are rotated. The keys of step i use entry
  // i % S::kSlots.
  MbarrierWord key_loaded[S::kSlots];
  MbarrierWord q_loaded[S::kQBarriers];
  alignas(512) Sm90Context contexts[S::kContexts];
  int32_t page_ids[2][2][kIdsOfBatch];  // two batches for each of two warps
  Sm90Readers readers;
  Sm90WaitingMerges waiting[S::kWarpgroups];
  MbarrierWord states_full;  // bulk copies have brought the states that Sm90Merge merges
  int32_t first_prepared[S::kContexts];
  int32_t on_pages;  // kAllOnPages or kSomeOffPages (pages.h)
  uint32_t free_position;
  // Tensor maps and wgmma need tiles at multiples of 1024 bytes, because address bits determine how
  // they permute the 16-byte chunks of a row.
  alignas(1024) unsigned char queries[S::kQBuffers][S::kQBytes];
  unsigned char ring[S::kRingBytes];  // the slots
  // After the ring come S::kStageBytes for the parts of tiles that warps prepare, unless these are
  // in the last slot.
};

/// Addresses in shared memory, as instructions take them.
template <typename S>
struct Sm90Smem {
  using Memory = Sm90SharedMemory<S>;
  static_assert(sizeof(Memory) == S::kHeaderBytes + S::kQBuffers * S::kQBytes + S::kRingBytes);
  static_assert(S::kQBytes % 1024 == 0 && S::kKeyBytes % 1024 == 0 && S::kValueBytes % 1024 == 0);
  static constexpr int kBytes = sizeof(Memory) + (S::kStagesInSlot ? 0 : S::kStageBytes);

  Memory& memory;
  uint32_t base;

  explicit FLASHPLAN_DEVICE Sm90Smem(Memory& memory)
      : memory(memory), base(shared_address(&memory)) {}

  FLASHPLAN_DEVICE uint32_t slot_full(uint32_t slot) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, slot_full) + slot * 8;
  }
  FLASHPLAN_DEVICE uint32_t slot_empty(uint32_t slot) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, slot_empty) + slot * 8;
  }
  FLASHPLAN_DEVICE uint32_t q_full(uint32_t part) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, q_full) + part * 8;
  }
  FLASHPLAN_DEVICE uint32_t q_empty(uint32_t part) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, q_empty) + part * 8;
  }
  /// The barrier of queries that are loaded. Where nobody rotates them, it is q_full().
  FLASHPLAN_DEVICE uint32_t q_loaded(uint32_t part) const {
    if constexpr (!S::kRotates) return q_full(part);
    return base + FLASHPLAN_OFFSET_OF(Memory, q_loaded) + part * 8;
  }
  FLASHPLAN_DEVICE uint32_t key_loaded(uint32_t step) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, key_loaded) + step * 8;
  }
  FLASHPLAN_DEVICE uint32_t context_full(uint32_t i) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, context_full) + i * 8;
  }
  FLASHPLAN_DEVICE uint32_t context_empty(uint32_t i) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, context_empty) + i * 8;
  }
  FLASHPLAN_DEVICE uint32_t tail_full(uint32_t warp) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, tail_full) + warp * 8;
  }
  FLASHPLAN_DEVICE uint32_t states_full() const {
    return base + FLASHPLAN_OFFSET_OF(Memory, states_full);
  }
  FLASHPLAN_DEVICE uint32_t context(uint32_t i) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, contexts) + i * sizeof(Sm90Context);
  }
  FLASHPLAN_DEVICE uint32_t first_prepared(uint32_t i) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, first_prepared) + i * 4;
  }
  FLASHPLAN_DEVICE uint32_t on_pages() const {
    return base + FLASHPLAN_OFFSET_OF(Memory, on_pages);
  }
  FLASHPLAN_DEVICE uint32_t free_position() const {
    return base + FLASHPLAN_OFFSET_OF(Memory, free_position);
  }
  /// The buffers for page ids of a warp that loads keys or values.
  FLASHPLAN_DEVICE uint32_t page_ids(uint32_t warp) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, page_ids) + warp * sizeof(memory.page_ids[0]);
  }
  FLASHPLAN_DEVICE uint32_t readers() const { return base + FLASHPLAN_OFFSET_OF(Memory, readers); }
  FLASHPLAN_DEVICE uint32_t waiting(uint32_t warpgroup) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, waiting) + warpgroup * sizeof(Sm90WaitingMerges);
  }
  /// Where keys and values have rings of their own, slots with even numbers have keys.
  FLASHPLAN_DEVICE uint32_t slot(uint32_t i) const {
    const uint32_t ring = base + FLASHPLAN_OFFSET_OF(Memory, ring);
    if constexpr (!S::kHasTwoRings) return ring + i * S::kSlotBytes;
    return ring + i / 2 * (S::kKeyBytes + S::kValueBytes) + i % 2 * S::kKeyBytes;
  }
  /// Where the queries of a tile begin. `place` counts the parts of buffers that tiles have taken
  /// so far: a tile of up to 64 rows takes one, any other tile takes all parts of a buffer.
  FLASHPLAN_DEVICE uint32_t queries(uint32_t place) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, queries) +
           place / S::kQParts % S::kQBuffers * S::kQBytes + place % S::kQParts * 64 * 128;
  }
  /// The room of a warp that prepares parts of tiles. The rooms are in the slot that the ring does
  /// not use while keys are prepared, or behind the slots.
  FLASHPLAN_DEVICE uint32_t part(uint32_t warp) const {
    return slot(S::kPreparedSlots) + warp * S::kPartBytes;
  }
};

}  // namespace flashplan::device
