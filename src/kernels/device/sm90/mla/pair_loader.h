// SPDX-License-Identifier: Apache-2.0
// The warps of the sm90_mla producer that bring and widen keys of 8 bits, in a pair of CTAs.
#pragma once

#include "kernels/device/sm90/mla/widening_warp.h"

namespace flashplan::device {

/// A warp has 8 rows of a block, so few that all of their raw bytes wait in registers: each half of
/// a row is loaded when that of the block before has been stored. So when a part of a slot is
/// freed, nothing is left to do but to widen, store and send. Consumers free right parts late, so
/// the rows of later blocks are looked up before the wait for the right part.
///
/// The compiler counts all loads of rows in one scoreboard, and waits for all that are under way
/// where it needs one. It waits once a block, with the first use of the right half, which was
/// loaded long before; the left half of the next block was loaded before the look-up. It also waits
/// at the first branch of a loop, unless the loop begins and goes on with the same loads under way.
///
/// Ids of pages, or entries of a list, are copied to shared memory two blocks ahead, since loads to
/// registers would be waited for together with the rows. Loads have no condition, because at its
/// branch the compiler would wait for all loads under way. So rows that do not exist are loaded
/// from a query, and replaced by zeros later.
template <typename S>
class MlaPairLoader : MlaWideningWarp<S> {
  static_assert(S::kPairs);
  using Base = MlaWideningWarp<S>;
  using typename Base::Block;
  using typename Base::Rows;
  using typename Base::Widening;

 public:
  using Base::Base;

  /// `queue_word`: this lane's word of QueueStart, from MlaRecordLoader::request_queue().
  FLASHPLAN_DEVICE void run(uint32_t queue_word) {
    const auto begin = [&](uint32_t, const auto& block_after) {
      load_left(rows_);
      copy_id(block_after(2));
    };
    const auto start = [&](uint32_t number) {
      load_right(rows_);
      fill_left(number, rows_, next_);
    };
    const auto fill = [&](uint32_t number, bool has_next, const auto& block_after) {
      return fill_slots(number, has_next, block_after);
    };
    Base::for_each_slot(queue_word, begin, start, fill);
  }

 private:
  using Base::kItems;
  using Base::kRows;
  using Base::lane;
  using Base::next_;
  using Base::p_;
  using Base::rows_;
  using Base::smem_;
  static_assert(Base::kGroups == 1 && Base::kHasTail);

  /// Fills this warp's rows of the right part of block `number`, and of the left part of the next
  /// block, if there is one. It is called by for_each_slot().
  template <typename BlockAfter>
  FLASHPLAN_DEVICE Rows fill_slots(uint32_t number, bool has_next, const BlockAfter& block_after) {
    cp_async_wait<0>();
    const auto id = static_cast<int32_t>(load_shared_4(smem_.id(Base::warp_, lane())));
    copy_id(block_after(3));
    const Rows later = Base::find(block_after(2), id);
    Base::prefetch(later);
    Base::wait(smem_.emptied(number, 1));
    store(number, 1, right_, right_scales_);
    Base::announce(number, 1);
    load_right(next_);
    if (has_next) fill_left(number + 1, next_, later);
    return later;
  }
  /// Widens and stores the left half and the tails of a block, whose rows are `rows`. Then loads
  /// the left half and the tails of the block after it, whose rows are `following`.
  FLASHPLAN_DEVICE void fill_left(uint32_t number, const Rows& rows, const Rows& following) {
    Base::wait(smem_.emptied(number, 0));
    hide_rows(rows);
    right_scales_ = scales_;
    store(number, 0, left_, scales_);
    store_tail(number);
    Base::report_found(number, rows);
    Base::announce(number, 0);
    load_left(following);
  }

  /// Starts to copy the id that find() needs for a block.
  FLASHPLAN_DEVICE void copy_id(const Block& block) const {
    const int row = Base::own_row();
    const int32_t* id = Base::places_.id_place(block.kv_row, block.key + row);
    const bool has_id = row < block.count && id != nullptr;
    cp_async_4_if(has_id, smem_.id(Base::warp_, lane()), has_id ? id : p_.tensors.q.data);
    cp_async_commit();
  }

  /// Loads the left half of the rows, their tails, and their scales. Lane i gets the scale of row
  /// i % 8 for the 128 dims from i / 8 * 128 on.
  FLASHPLAN_DEVICE void load_left(const Rows& rows) {
    const unsigned char* from = Base::content(rows, 0);
#pragma unroll
    for (int i = 0; i < kItems; ++i) left_[i] = load_once_16(from + i * 64);
    if constexpr (Base::kTailHas8Bits) {
      tail_[0] = load_once_16(Base::tail(rows, 0));
    } else {
#pragma unroll
      for (int i = 0; i < Base::kTailCopies; ++i) {
        tail_[i] = load_once_16(Base::copied_tail(rows, i));
      }
    }
    if constexpr (Widening::kHasScales) {
      const unsigned char* row = shuffled_pointer(rows.own, lane() % kRows);
      scales_ = __uint_as_float(load_global_4(row + Widening::kContentDims + lane() / kRows * 4));
    }
  }
  /// Loads the right half of the rows. `zero`, which is 0, is computed from what load_left() has
  /// loaded, and added to the address. So the left half is there before these loads begin, and its
  /// uses do not wait for them.
  FLASHPLAN_DEVICE void load_right(const Rows& rows) {
    const uint32_t zero = left_[0].x & static_cast<uint32_t>(Base::warp_ / S::kWideningWarps);
    const unsigned char* from = Base::content(rows, 0) + S::kHalfDims + zero;
#pragma unroll
    for (int i = 0; i < kItems; ++i) right_[i] = load_once_16(from + i * 64);
  }

  /// Replaces rows that do not exist by zeros. There are few blocks with such rows.
  FLASHPLAN_DEVICE void hide_rows(const Rows& rows) {
    constexpr uint32_t kAll = (1U << kRows) - 1;
    if ((rows.existing & kAll) == kAll) return;
    asm volatile("");  // keeps this a branch instead of selects in every block
    const auto zeros_unless = [](bool exists, uint4& bytes) {
      if (!exists) bytes = {0, 0, 0, 0};
    };
    const bool exists = Base::exists(rows, 0);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      zeros_unless(exists, left_[i]);
      zeros_unless(exists, right_[i]);
    }
    if constexpr (Base::kTailHas8Bits) zeros_unless(exists, tail_[0]);
#pragma unroll
    for (int i = 0; i < Base::kTailCopies; ++i) {
      zeros_unless(Base::exists_copied(rows, i), tail_[i]);
    }
    if ((rows.existing >> lane() % kRows & 1) == 0) scales_ = 0.0F;
  }

  /// Widens and stores the items of a half.
  FLASHPLAN_DEVICE void store(uint32_t number, int part, const uint4 (&items)[kItems],
                              float scales) const {
    const uint32_t to = Base::own_half(number, part);
    float scale = 1.0F;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i % 2 == 0) scale = Base::scale_of(scales, 0, part * kItems + i);  // for two items
      Base::store_widened(to + Base::place_in_half(0, i), items[i], scale);
    }
  }
  FLASHPLAN_DEVICE void store_tail(uint32_t number) const {
    if constexpr (Base::kTailHas8Bits) {
      Base::store_widened(Base::own_tail(number), tail_[0], 1.0F);
    } else {
#pragma unroll
      for (int i = 0; i < Base::kTailCopies; ++i) {
        store_shared_16(Base::tail_place(number, i), Base::converted_tail(tail_[i]));
      }
    }
  }

  uint4 left_[kItems] = {};   // this lane's items of the left half
  uint4 right_[kItems] = {};  // this lane's items of the right half
  uint4 tail_[Base::kTailHas8Bits ? 1 : Base::kTailCopies] = {};
  float scales_ = 1.0F;        // for scale_of(): scales of the rows in left_
  float right_scales_ = 1.0F;  // for scale_of(): scales of the rows in right_
};

}  // namespace flashplan::device
