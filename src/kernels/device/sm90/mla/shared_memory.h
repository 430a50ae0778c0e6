// SPDX-License-Identifier: Apache-2.0
// What a CTA of the sm90_mla family keeps in shared memory.
#pragma once

#include "abi/work_queue.h"
#include "kernels/device/offset_of.h"
#include "kernels/device/sm90/mla/shape.h"

namespace flashplan::device {

/// Rows that this CTA has to merge after the end of the queue (MlaMerge::merge_waiting()).
struct MlaWaitingMerge {
  Merge merge;
  int32_t begin;  // the first of the rows
  int32_t end;
};

/// A block is the keys of one step. Blocks are counted over the whole queue, from 0: block b is in
/// slot b % 2. Warpgroup w of the consumers ("the owner") computes the logits and the weights of
/// those blocks of a tile whose number in the tile is w, w + 2, ...; both warpgroups multiply the
/// weights with the values, each with its half of the values' columns.
///
///   1. Each slot has a left part (the left half of the values) and a right part (the right half,
///      and the tail), with an mbarrier for full and one for empty each. The four
///      warps of warpgroup 0 free left parts, and those of warpgroup 1 right parts, after the
///      product with the values. The owner has read both parts before: it finishes its logits
///      before it publishes the weights, without which nobody multiplies values. So when a part is
///      empty nobody reads it, and a tail, which logits alone read, may be written as soon as the
///      left part is empty. Phases are told apart by parity: block b is phase b / 2 of its slot.
///      A part is written again only after it was freed, so nobody falls two phases behind.
///   2. A tile without steps (Sm90Context::has_steps) has no block. Any other tile has at least
///      one, also where it has no keys; producer and consumers compute the number in one function.
///   3. `weights` has the weights of one block. The owner of a block writes them, makes them
///      visible to the tensor cores (fence of the async proxy), and arrives at the named barrier of
///      even or of odd blocks; the other warpgroup waits there. Before the owner writes, it has
///      itself finished its product with the weights of the block before, which the other warpgroup
///      wrote: all its warps wait for that product, and meet at their own barrier. So the
///      warpgroups take turns strictly: even weights, odd weights, even weights. Neither arrives
///      twice at a barrier before the other has waited once: between two arrivals it waits at the
///      other barrier, or at kConsumerBarrier.
///   4. `shift` and `raised` belong to the weights: the owner writes them before it arrives, the
///      other warpgroup reads them behind its wait. Warp i of either warpgroup has the same rows,
///      and reads and writes only these.
///   5. Queries: one buffer. It is full when its bytes have arrived, and empty when all eight warps
///      have computed their last weights of the tile (where weights come out too large, logits are
///      computed again, from the queries). Tile t with steps is phase t of both barriers.
///   6. After the last block of a tile, or of a chunk of it, both warpgroups write their sums of
///      weights and meet at kConsumerBarrier. So the next blocks find `weights`, `shift` and
///      `raised` unread. Sums have two buffers, because a warpgroup may write the next ones while
///      the other one reads. Results are staged in `weights`: then the warpgroups meet at
///      kConsumerBarrier again, before the next weights are written.
///   7. Contexts: the record of work tile i is in entry i % kContexts, and behind the last tile is
///      a record with is_end. The warp that writes records waits until all readers have freed the
///      entry's last record: the warps of consumers, and those that bring keys, free each record.
///      `num_states` belongs to the record: in batch-invariant plans, the states that the tile
///      writes if it belongs to a merge.
///   8. `on_pages` is set to kSomeOffPages before keys on no page are announced, and stays so.
///      `found` is for lists of keys alone: it belongs to the left part of its slot, and has a bit
///      for each key of the block, bit i % 8 of byte i / 8, that says whether the cache has the
///      key.
///   9. After the last tile, behind a barrier of all consumers, no bulk copies are under way, and
///      `waiting` is read.
///  10. Where values are tensors of their own, a slot has first the keys of its block, then, once
///      the owner has computed the logits and freed both parts, the values: their left half in the
///      left part, their right half in the right part. Keys and values have barriers of their own,
///      so that block b is phase b / 2 of each. The keys of block b wait for the values of block
///      b - 2, and the values of block b for its keys.
///  11. In a pair of CTAs, consumers free a part in both CTAs, so it is empty when the consumers of
///      both have freed it. Then the producers of both CTAs may write to it. This CTA's copies from
///      it to the other CTA are complete by then, since the other CTA's consumers have used what
///      these copies brought.
template <typename S>
struct alignas(1024) MlaSharedMemory {
  static constexpr int kOperands = S::kHasValues ? 2 : 1;

  // Each slot's left and right part: of keys, then of values that are tensors of their own.
  uint64_t full[kOperands * S::kSlots][2];
  uint64_t empty[kOperands * S::kSlots][2];
  alignas(8) uint8_t found[S::kSlots][S::kTileKv / 8];
  uint64_t tail_full;  // the boxes of a tile's last block are there, so zeros may be written
  uint64_t q_full;
  uint64_t q_empty;
  uint64_t context_full[S::kContexts];
  uint64_t context_empty[S::kContexts];
  int32_t on_pages;  // kAllOnPages or kSomeOffPages, see pages.h
  int32_t num_waiting;
  MlaWaitingMerge waiting[kMostSplitsPerQueue];
  uint32_t raised[4];  // for each warp: whether the shifts of its rows were raised
  float shift[S::kTileQ];
  float sums[2][S::kWarpgroups][S::kTileQ];
  int32_t num_states[S::kContexts];
  alignas(64) Sm90Context contexts[S::kContexts];
  // For each lane of MlaPairLoader's warps: the page id, or entry of a list, of the key that the
  // lane looks up next (KeyPlaces::find()).
  int32_t ids[S::kPairs ? S::kWideningWarps : 1][32];
  // Tensor maps and wgmma need tiles at multiples of 1024 bytes: the permutation of 16-byte groups
  // follows from address bits.
  alignas(1024) unsigned char queries[S::kQBytes];
  unsigned char slots[S::kSlots][S::kSlotBytes];  // left half, right half, tail
  unsigned char weights[S::kWeightsBytes];
};

/// Addresses in shared memory, as instructions take them.
template <typename S>
struct MlaSmem {
  using Memory = MlaSharedMemory<S>;
  static constexpr int kBytes = sizeof(Memory);
  static_assert(kBytes <= 227 * 1024 && S::kSlotBytes % 1024 == 0);
  static_assert(FLASHPLAN_OFFSET_OF(Memory, queries) <= S::kHeaderBytes);

  Memory& memory;
  uint32_t base;

  explicit FLASHPLAN_DEVICE MlaSmem(Memory& memory)
      : memory(memory), base(shared_address(&memory)) {}

  static FLASHPLAN_DEVICE uint32_t slot_of(uint32_t block) { return block % S::kSlots; }
  /// The phase in which a part of a block (0: left, 1: right) is full.
  FLASHPLAN_DEVICE MbarrierPhase full(uint32_t block, int part) const {
    return {base + FLASHPLAN_OFFSET_OF(Memory, full) + slot_of(block) * 16 + part * 8,
            block / S::kSlots & 1};
  }
  /// The phase in which this part of the previous block in the same slot is freed.
  FLASHPLAN_DEVICE MbarrierPhase emptied(uint32_t block, int part) const {
    return {empty(block, part), (block / S::kSlots & 1) ^ 1};
  }
  FLASHPLAN_DEVICE uint32_t empty(uint32_t block, int part) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, empty) + slot_of(block) * 16 + part * 8;
  }
  // Phases where values are a tensor of their own, and take the place of the keys in the slot.
  // keys_read(): the keys of the block have been read, so its values may come. values_read(): the
  // values of the previous block in the slot have been read, so the keys of this block may come.
  FLASHPLAN_DEVICE MbarrierPhase values_full(uint32_t block, int part) const {
    const MbarrierPhase of_keys = full(block, part);
    return {of_keys.barrier + S::kSlots * 16, of_keys.parity};
  }
  FLASHPLAN_DEVICE uint32_t values_empty(uint32_t block, int part) const {
    return empty(block, part) + S::kSlots * 16;
  }
  FLASHPLAN_DEVICE MbarrierPhase keys_read(uint32_t block, int part) const {
    return {empty(block, part), block / S::kSlots & 1};
  }
  FLASHPLAN_DEVICE MbarrierPhase values_read(uint32_t block, int part) const {
    return {values_empty(block, part), (block / S::kSlots & 1) ^ 1};
  }
  FLASHPLAN_DEVICE uint32_t found(uint32_t block) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, found) + slot_of(block) * (S::kTileKv / 8);
  }
  FLASHPLAN_DEVICE uint32_t tail_full() const {
    return base + FLASHPLAN_OFFSET_OF(Memory, tail_full);
  }
  FLASHPLAN_DEVICE uint32_t q_full() const { return base + FLASHPLAN_OFFSET_OF(Memory, q_full); }
  FLASHPLAN_DEVICE uint32_t q_empty() const { return base + FLASHPLAN_OFFSET_OF(Memory, q_empty); }
  FLASHPLAN_DEVICE uint32_t context_full(uint32_t i) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, context_full) + i % S::kContexts * 8;
  }
  FLASHPLAN_DEVICE uint32_t context_empty(uint32_t i) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, context_empty) + i % S::kContexts * 8;
  }
  FLASHPLAN_DEVICE uint32_t context(uint32_t i) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, contexts) + i % S::kContexts * sizeof(Sm90Context);
  }
  FLASHPLAN_DEVICE uint32_t on_pages() const {
    return base + FLASHPLAN_OFFSET_OF(Memory, on_pages);
  }
  FLASHPLAN_DEVICE uint32_t num_waiting() const {
    return base + FLASHPLAN_OFFSET_OF(Memory, num_waiting);
  }
  FLASHPLAN_DEVICE uint32_t raised(int warp) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, raised) + warp * 4;
  }
  FLASHPLAN_DEVICE uint32_t shift(int row) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, shift) + row * 4;
  }
  /// `number`: how many states of the queue came before this one, or the parity of that.
  FLASHPLAN_DEVICE uint32_t sum(uint32_t number, int warpgroup, int row) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, sums) +
           ((number % 2 * S::kWarpgroups + warpgroup) * S::kTileQ + row) * 4;
  }
  FLASHPLAN_DEVICE uint32_t id(int warp, int lane) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, ids) + (warp * 32 + lane) * 4;
  }
  /// An address as operands of products take it: without the number of the CTA in its cluster.
  static FLASHPLAN_DEVICE uint32_t of_operand(uint32_t address) {
    return S::kPairs ? address & 0xffffffU : address;
  }
  FLASHPLAN_DEVICE uint32_t queries() const { return base + FLASHPLAN_OFFSET_OF(Memory, queries); }
  FLASHPLAN_DEVICE uint32_t slot(uint32_t block) const {
    return base + FLASHPLAN_OFFSET_OF(Memory, slots) + slot_of(block) * S::kSlotBytes;
  }
  /// The address of a half of a block's values (0: left, 1: right).
  FLASHPLAN_DEVICE uint32_t half(uint32_t block, int part) const {
    return slot(block) + part * S::kHalfBytes;
  }
  FLASHPLAN_DEVICE uint32_t tail(uint32_t block) const { return half(block, 2); }
  FLASHPLAN_DEVICE uint32_t weights() const { return base + FLASHPLAN_OFFSET_OF(Memory, weights); }
};

/// The number, in the work tile, of this CTA's first row: a pair of CTAs divides a tile's rows.
template <typename S>
FLASHPLAN_DEVICE int32_t first_row_of_cta() {
  return S::kPairs ? static_cast<int32_t>(cluster_rank()) * S::kTileQ : 0;
}

/// The number of blocks of a tile with steps, whose keys are [begin, end).
template <typename S>
FLASHPLAN_DEVICE int32_t num_blocks(int32_t begin, int32_t end) {
  return max(1, (end - begin + S::kTileKv - 1) / S::kTileKv);
}

}  // namespace flashplan::device
