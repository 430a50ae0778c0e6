// SPDX-License-Identifier: Apache-2.0
// The warps of the sm90_mla producer that bring keys row by row.
#pragma once

#include "kernels/device/sm90/mla/key_loader.h"
#include "kernels/device/sm90/mla/key_places.h"
#include "kernels/device/unaligned_copy.h"

namespace flashplan::device {

/// Three warps copy rows of every block, for lists of keys, small pages, and tensors that no map
/// describes. A block has a left and a right part; each thread arrives at the barrier of a part
/// when its copies to that part are complete. These copies write shared memory through the generic
/// proxy, and wgmma reads it through the async proxy, so consumers put a fence behind their wait.
///
/// Eight lanes copy a row, 128 bytes at once. Warp w has groups w, w + 3 and w + 6 of 8 rows. A
/// lane looks up one row and computes its address while the block waits for its slot; the eight
/// lanes that copy it get the address by a shuffle. So nothing is left to do between the wait and
/// the copies. `kVectorized`: rows can be copied 16 bytes at a time.
template <typename S, bool kVectorized>
class MlaRowLoader : MlaKeyWarp<S> {
  using Base = MlaKeyWarp<S>;
  using Block = typename Base::Block;

 public:
  /// The arrivals that the barrier of each part of a block waits for.
  static constexpr int kArrivals = S::kGatherWarps * 32;

  /// `warp`: this warp's number among the warps that copy rows.
  FLASHPLAN_DEVICE MlaRowLoader(const AttentionParams& p, const MlaSmem<S>& smem, int warp)
      : Base(p, smem), places_(p), warp_(warp) {}

  FLASHPLAN_DEVICE void run() {
    Base::for_each_block(
        [&](const Block& block) { return request(block); },
        [&](const Block& block, int32_t id) { prefetch(block, id); },
        [&](const Block& block, uint32_t number, int32_t id) { fill(block, number, id); });
  }

 private:
  using Base::lane_;
  using Base::p_;
  using Base::smem_;

  static constexpr int kGroups = S::kTileKv / 8;
  static constexpr int kOwnGroups = (kGroups + S::kGatherWarps - 1) / S::kGatherWarps;
  static constexpr int kCopies = 2 * kOwnGroups;  // rows that a lane helps to copy
  static_assert(8 * kOwnGroups <= 32);            // a lane looks up one row

  /// The first row of the warp's group number `i`.
  FLASHPLAN_DEVICE int first_row(int i) const { return (i * S::kGatherWarps + warp_) * 8; }
  /// The row that this lane looks up; at least kTileKv if it looks up none.
  FLASHPLAN_DEVICE int own_row() const {
    const int row = first_row(lane_ / 8) + lane_ % 8;
    return lane_ < 8 * kOwnGroups ? row : S::kTileKv;
  }

  FLASHPLAN_DEVICE int32_t request(const Block& block) const {
    const int row = own_row();
    return row < block.count ? places_.request(block.kv_row, block.key + row) : 0;
  }

  /// What this lane has looked up. If the key is not in the cache, or nobody sees it, the addresses
  /// are those of the cache's first row.
  struct Source {
    const unsigned char* row;
    const unsigned char* tail;
    bool is_seen;  // some query of the tile sees the key
    bool exists;   // is_seen, and the cache has the key
  };
  FLASHPLAN_DEVICE Source source(const Block& block, int32_t id) const {
    const KvView& view = p_.tensors.k;
    const int row = own_row();
    KeyPlace place = places_.find(block.kv_row, block.key + row, id);
    const bool is_seen = row >= block.num_hidden && row < block.count;
    const bool exists = is_seen && place.exists;
    if (!exists) place = {0, 0, false};
    const auto* from = static_cast<const unsigned char*>(view.data) + 2 * place.offset(view);
    const unsigned char* tail = from + S::kHeadDimVo * 2;
    if (p_.tails.k.num_dims > 0) {
      const KvView& own = p_.tails.k.view;
      tail = static_cast<const unsigned char*>(own.data) + 2 * place.offset(own);
    }
    return {from, tail, is_seen, exists};
  }

  /// Brings the keys of a block to the L2 cache, so that they arrive sooner when a slot becomes
  /// free.
  FLASHPLAN_DEVICE void prefetch(const Block& block, int32_t id) const {
    if (!kVectorized || !block.is_prefetched) return;
    const Source own = source(block, id);
    if (!own.exists) return;
#pragma unroll
    for (int b = 0; b < S::kHeadDimVo / 64; ++b) prefetch_l2(own.row + b * 128);
    if (S::kTailDims > 0) prefetch_l2(own.tail);
  }

  /// Copies this warp's rows of a block to its slot. Zeros replace rows past the last key, rows of
  /// keys that no query sees, and rows of keys that are not in the cache: what lies there may be
  /// NaN, and 0 * NaN is NaN.
  FLASHPLAN_DEVICE void fill(const Block& block, uint32_t number, int32_t id) const {
    const Source own = source(block, id);
    const uint32_t existing = __ballot_sync(0xffffffffU, own.exists);
    const unsigned char* rows[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      rows[i] = shuffled_pointer(own.row, lane_of(i)) + lane_ % 8 * 16;
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      Base::wait(smem_.emptied(number, part));
      if (part == 0) report(own, existing, number);
      const uint32_t full = smem_.full(number, part).barrier;
      if constexpr (kVectorized) {
        copy(rows, own.tail, existing, number, part);
        mbarrier_arrive_after_copies(full);
      } else {
        copy_unaligned(own.row, own.tail, existing, number, part);
        mbarrier_arrive(full);
      }
    }
  }

  /// Tells the consumers which keys of the block are in the cache. Entries of a list may name no
  /// key on purpose, so with lists each block has a bit for each key.
  FLASHPLAN_DEVICE void report(const Source& own, uint32_t existing, uint32_t number) const {
    if (!places_.are_listed()) {
      Base::report_pages(own.exists || !own.is_seen);
    } else if (lane_ < kOwnGroups && first_row(lane_) < S::kTileKv) {
      smem_.memory.found[number % S::kSlots][first_row(lane_) / 8] =
          static_cast<uint8_t>(existing >> 8 * lane_);
    }
  }

  /// The lane that has looked up the row of copy number `i` of this lane.
  FLASHPLAN_DEVICE int lane_of(int i) const { return i * 4 + lane_ / 8; }
  /// Where this lane's 16 bytes of copy number `i` belong, in a part of a block with the layout of
  /// `Tile`.
  template <typename Tile>
  FLASHPLAN_DEVICE uint32_t offset(int i) const {
    const int group = first_row(i / 2) / 8;
    return group * Tile::kGroupBytes + Tile::offset(i % 2 * 4 + lane_ / 8, lane_ % 8);
  }

  /// Copies a part of a block. `rows`: for each row that this lane helps to copy, where the lane's
  /// 16 bytes begin. `own_tail`: where the tail of the row that this lane has looked up begins.
  FLASHPLAN_DEVICE void copy(const unsigned char* const (&rows)[kCopies],
                             const unsigned char* own_tail, uint32_t existing, uint32_t number,
                             int part) const {
    const uint32_t copied = existing >> lane_ / 8;  // bit 4 * i: whether the row of copy i exists
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (first_row(i / 2) >= S::kTileKv) break;
      const int num_bytes = (copied & 1U << 4 * i) != 0 ? 16 : 0;
      const uint32_t to = smem_.half(number, part) + offset<typename S::Half>(i);
#pragma unroll
      for (int b = 0; b < S::Half::kBlocks; ++b) {
        cp_async_16_padded(to + b * S::Half::kBlockBytes,
                           rows[i] + part * S::kHalfDims * 2 + b * 128, num_bytes);
      }
      if (part == 1 && S::kTailDims > 0) {
        cp_async_16_padded(smem_.tail(number) + offset<typename S::Tail>(i),
                           shuffled_pointer(own_tail, lane_of(i)) + lane_ % 8 * 16, num_bytes);
      }
    }
  }

  /// Copies a part of a block whose rows cannot be copied 16 bytes at a time. `own_row`: where the
  /// row that this lane has looked up begins.
  FLASHPLAN_DEVICE void copy_unaligned(const unsigned char* own_row, const unsigned char* own_tail,
                                       uint32_t existing, uint32_t number, int part) const {
#pragma unroll 1
    for (int i = 0; i < kCopies && first_row(i / 2) < S::kTileKv; ++i) {
      const int num_valid = (existing >> lane_of(i) & 1) != 0 ? 8 : 0;
      const unsigned char* row =
          shuffled_pointer(own_row, lane_of(i)) + part * S::kHalfDims * 2 + lane_ % 8 * 16;
      const unsigned char* tail = shuffled_pointer(own_tail, lane_of(i)) + lane_ % 8 * 16;
      const uint32_t to = smem_.half(number, part) + offset<typename S::Half>(i);
#pragma unroll 1
      for (int b = 0; b < S::Half::kBlocks; ++b) {
        copy_unaligned_16<2>(to + b * S::Half::kBlockBytes, row + b * 128, num_valid);
      }
      if (part == 1 && S::kTailDims > 0) {
        copy_unaligned_16<2>(smem_.tail(number) + offset<typename S::Tail>(i), tail, num_valid);
      }
    }
  }

  const KeyPlaces places_;
  const int warp_;
};

/// Copies rows that are not aligned. It is not inlined, so that it takes no registers from other
/// code.
template <typename S>
__device__ __noinline__ void copy_unaligned_rows(const AttentionParams& p, const MlaSmem<S>& smem,
                                                 int warp) {
  MlaRowLoader<S, false>(p, smem, warp).run();
}

}  // namespace flashplan::device
