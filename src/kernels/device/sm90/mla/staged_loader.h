// SPDX-License-Identifier: Apache-2.0
// The warps of the sm90_mla producer that bring keys of 8 bits, and widen them to the 16 bits that
// wgmma reads.
#pragma once

#include "kernels/device/sm90/mla/widening_warp.h"

namespace flashplan::device {

/// Four warps bring and widen keys. Queries and two blocks of 16 bits fill shared memory, so raw
/// rows, of 8 bits, have no memory of their own. They wait in two places until they are widened:
///
/// - The right half of a block waits in registers. It is requested when that of the block before
///   has been stored, so it has the time of a whole block to arrive.
/// - The left half, the tail and the scales are copied, raw, to their place in the slot as soon as
///   the left part is empty, and widened in place. The left part is empty early: warpgroup 0 of the
///   consumers frees it without waiting for a later block, whereas warpgroup 1 computes the logits
///   of an odd block before it frees the right part of the even block before it. A tail is read by
///   logits alone, so it is empty when the left part is. So the copies of a block are often under
///   way while the block before is widened.
///
/// Each lane copies the bytes that it will widen itself. 8 rows by 64 dims have one item for each
/// lane, 512 raw bytes in all. The item of lane i lies at 16 * i, so that neither copies nor loads
/// meet in a bank. Raw items lie in the second half of the memory that widened ones take. The
/// widened items of the warp's first 8 rows lie before all raw items. Those of its second 8 rows
/// overwrite the raw items of the first 8 rows, which are not needed any more, and their own raw
/// items, all of which a warp loads before it stores any. Scales lie where the first widened items
/// come. So do page ids, or entries of a list, for a block that comes two blocks later: if these
/// were loaded to registers, the compiler would wait for them together with the right half.
///
/// The compiler places the waits for loads to registers. At a branch it waits for all loads that
/// are under way at once, so loads have no condition: rows that do not exist are loaded from a
/// query, and replaced by zeros later.
template <typename S>
class MlaStagedLoader : MlaWideningWarp<S> {
  static_assert(!S::kPairs);
  using Base = MlaWideningWarp<S>;
  using typename Base::Block;
  using typename Base::Rows;
  using typename Base::Widening;

 public:
  using Base::Base;

  /// `queue_word`: this lane's word of QueueStart, from MlaRecordLoader::request_queue().
  FLASHPLAN_DEVICE void run(uint32_t queue_word) {
    const auto begin = [&](uint32_t number, const auto& block_after) {
      load_right(rows_);
      wait_and_copy_left(number, rows_, block_after(2));
    };
    const auto fill = [&](uint32_t number, bool has_next, const auto& block_after) {
      return fill_slot(number, has_next, block_after);
    };
    Base::for_each_slot(queue_word, begin, [](uint32_t) {}, fill);
  }

 private:
  using Base::kGroups;
  using Base::kItems;
  using Base::kRows;
  using Base::lane;
  using Base::next_;
  using Base::p_;
  using Base::rows_;
  using Base::smem_;

  static constexpr int kRawBytes = 32 * 16;  // raw bytes of one item of each lane
  static_assert(2 * kRawBytes == S::Half::kBlockBytes && 2 * kRawBytes == S::Tail::kGroupBytes);

  /// Fills this warp's rows of the slot of block `number`, whose raw left half is under way. It is
  /// called by for_each_slot().
  template <typename BlockAfter>
  FLASHPLAN_DEVICE Rows fill_slot(uint32_t number, bool has_next, const BlockAfter& block_after) {
    const bool is_empty = left_is_empty(number + 1);
    bool copies = has_next && is_empty;
    if (copies) {
      copy_left(number + 1, next_, block_after(3));
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    const auto later_id = static_cast<int32_t>(load_shared_4(id_memory(number)));
    load_scales(number);
    widen_left(number);
    Base::report_found(number, rows_);
    Base::announce(number, 0);
    widen_tail(number);
    if (has_next && !copies && left_is_empty(number + 1)) {
      copy_left(number + 1, next_, block_after(3));
      copies = true;
    }
    const Rows later = Base::find(block_after(2), later_id);
    Base::prefetch(later);
    Base::wait(smem_.emptied(number, 1));
    store_right(number);
    Base::announce(number, 1);
    load_right(next_);
    if (has_next && !copies) wait_and_copy_left(number + 1, next_, block_after(3));
    return later;
  }

  FLASHPLAN_DEVICE bool left_is_empty(uint32_t number) const {
    const MbarrierPhase emptied = smem_.emptied(number, 0);
    return __all_sync(0xffffffffU, mbarrier_test(emptied.barrier, emptied.parity)) != 0;
  }
  FLASHPLAN_DEVICE void wait_and_copy_left(uint32_t number, const Rows& rows,
                                           const Block& later) const {
    Base::wait(smem_.emptied(number, 0));
    copy_left(number, rows, later);
  }

  FLASHPLAN_DEVICE void load_right(const Rows& rows) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const unsigned char* from = Base::content(rows, group) + S::kHalfDims;
#pragma unroll
      for (int i = 0; i < kItems; ++i) right_[group][i] = load_once_16(from + i * 64);
    }
  }
  FLASHPLAN_DEVICE void store_right(uint32_t number) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const bool exists = Base::exists(rows_, group);
      uint4 items[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        items[i] = exists ? right_[group][i] : uint4{0, 0, 0, 0};
      }
      store(number, 1, group, items);
    }
  }

  /// raw_half(): where this lane's raw items of the left half begin; raw_tail(): where those of the
  /// tail begin.
  FLASHPLAN_DEVICE uint32_t raw_half(uint32_t number) const {
    return Base::own_half(number, 0) + kGroups * kItems * kRawBytes + lane() * 16;
  }
  FLASHPLAN_DEVICE uint32_t raw_tail(uint32_t number) const {
    return Base::own_tail(number) + kGroups * kRawBytes + lane() * 16;
  }
  /// Where this lane's page id, or entry of a list, for a later block is: behind the scales.
  FLASHPLAN_DEVICE uint32_t id_memory(uint32_t number) const {
    return Base::own_half(number, 0) + kRows * 16 + lane() * 4;
  }
  /// Starts one group of copies: the left half, tails and scales of block `number`, and the ids
  /// that find() needs for block `later`, which comes two blocks after it.
  FLASHPLAN_DEVICE void copy_left(uint32_t number, const Rows& rows, const Block& later) const {
    const uint32_t to = raw_half(number);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const unsigned char* from = Base::content(rows, group);
      const int num_bytes = Base::exists(rows, group) ? 16 : 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        cp_async_16_padded(to + (group * kItems + i) * kRawBytes, from + i * 64, num_bytes);
      }
      if constexpr (Base::kTailHas8Bits) {
        cp_async_16_padded(raw_tail(number) + group * kRawBytes, Base::tail(rows, group),
                           num_bytes);
      }
    }
#pragma unroll
    for (int i = 0; i < Base::kTailCopies; ++i) {
      cp_async_16_padded(Base::tail_place(number, i), Base::copied_tail(rows, i),
                         Base::exists_copied(rows, i) ? 16 : 0);
    }
    if constexpr (Widening::kHasScales) {
      // Lane i brings the four scales of row i.
      if (lane() < kRows) {
        cp_async_16_padded(Base::own_half(number, 0) + lane() * 16,
                           rows.own + Widening::kContentDims,
                           (rows.existing >> lane() & 1) != 0 ? 16 : 0);
      }
    }
    const int row = Base::own_row();
    const int32_t* id = Base::places_.id_place(later.kv_row, later.key + row);
    const bool has_id = row < later.count && id != nullptr;
    cp_async_4_if(has_id, id_memory(number), has_id ? id : p_.tensors.q.data);
    cp_async_commit();
  }
  FLASHPLAN_DEVICE void load_scales(uint32_t number) {
    if constexpr (Widening::kHasScales) {
      __syncwarp();  // other lanes have copied them
      const uint32_t from = Base::own_half(number, 0) + lane() % kRows * 16 + lane() / kRows * 4;
      scales_[0] = __uint_as_float(load_shared_4(from));
      scales_[1] = __uint_as_float(load_shared_4(from + 8));
    }
  }
  FLASHPLAN_DEVICE void widen_left(uint32_t number) const {
    const uint32_t from = raw_half(number);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint4 items[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        items[i] = load_shared_16(from + (group * kItems + i) * kRawBytes);
      }
      __syncwarp();
      store(number, 0, group, items);
    }
  }
  FLASHPLAN_DEVICE void widen_tail(uint32_t number) const {
    if constexpr (Base::kTailHas8Bits) {
      uint4 items[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        items[group] = load_shared_16(raw_tail(number) + group * kRawBytes);
      }
      __syncwarp();
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        Base::store_widened(Base::own_tail(number) + group * S::Tail::kGroupBytes, items[group],
                            1.0F);
      }
    } else if constexpr (S::kQ != DType::kBFloat16) {
#pragma unroll
      for (int i = 0; i < Base::kTailCopies; ++i) {
        const uint32_t place = Base::tail_place(number, i);
        store_shared_16(place, Base::converted_tail(load_shared_16(place)));
      }
    }
  }

  /// Widens and stores this lane's items of a group of 8 rows, in one half of the dims.
  FLASHPLAN_DEVICE void store(uint32_t number, int part, int group,
                              const uint4 (&items)[kItems]) const {
    const uint32_t to = Base::own_half(number, part);
    float scale = 1.0F;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i % 2 == 0) scale = Base::scale_of(scales_[part], group, i);  // for two items
      Base::store_widened(to + Base::place_in_half(group, i), items[i], scale);
    }
  }

  uint4 right_[kGroups][kItems] = {};  // raw items of the right half of a block
  float scales_[2] = {};               // for scale_of(): scales of the left and the right half
};

}  // namespace flashplan::device
