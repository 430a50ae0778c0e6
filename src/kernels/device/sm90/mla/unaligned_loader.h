// SPDX-License-Identifier: Apache-2.0
// The warps of the sm90_mla producer that bring and widen keys of 8 bits whose rows cannot be
// loaded 16 bytes at a time.
#pragma once

#include "kernels/device/sm90/mla/widening_warp.h"

namespace flashplan::device {

/// Loads each item byte by byte, right before it is widened and stored.
template <typename S>
class MlaUnalignedLoader : MlaWideningWarp<S> {
  using Base = MlaWideningWarp<S>;
  using typename Base::Rows;
  using typename Base::Widening;

 public:
  using Base::Base;

  FLASHPLAN_DEVICE void run(uint32_t queue_word) {
    const auto fill = [&](uint32_t number, bool, const auto& block_after) {
      fill_slot(number);
      return Base::find(block_after(2), Base::request(block_after(2)));
    };
    Base::for_each_slot(queue_word, [](uint32_t, const auto&) {}, [](uint32_t) {}, fill);
  }

 private:
  using Base::lane;
  using Base::rows_;
  using Base::smem_;

  FLASHPLAN_DEVICE void fill_slot(uint32_t number) const {
    mbarrier_wait(smem_.emptied(number, 0), smem_.emptied(number, 1));
    Base::report_found(number, rows_);
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const float scales = load_scales(part);
#pragma unroll 1
      for (int i = 0; i < Base::kGroups * Base::kItems; ++i) {
        const int group = i / Base::kItems;
        const int item = i % Base::kItems;
        const unsigned char* from = Base::content(rows_, group) + part * S::kHalfDims + item * 64;
        Base::store_widened(Base::own_half(number, part) + Base::place_in_half(group, item),
                            load(from, Base::exists(rows_, group) ? 16 : 0),
                            Base::scale_of(scales, group, item));
      }
      if (part == (S::kPairs ? 0 : 1)) store_tail(number);
      Base::announce(number, part);
    }
  }
  FLASHPLAN_DEVICE void store_tail(uint32_t number) const {
    if constexpr (Base::kTailHas8Bits) {
#pragma unroll 1
      for (int group = 0; group < Base::kGroups; ++group) {
        const uint4 bytes = load(Base::tail(rows_, group), Base::exists(rows_, group) ? 16 : 0);
        Base::store_widened(Base::own_tail(number) + group * S::Tail::kGroupBytes, bytes, 1.0F);
      }
    }
#pragma unroll 1
    for (int i = 0; i < Base::kTailCopies; ++i) {
      const uint4 pairs = load(Base::copied_tail(rows_, i), Base::exists_copied(rows_, i) ? 16 : 0);
      store_shared_16(Base::tail_place(number, i), Base::converted_tail(pairs));
    }
  }

  /// The scales of half of the dims, for scale_of().
  FLASHPLAN_DEVICE float load_scales(int part) const {
    if constexpr (!Widening::kHasScales) return 1.0F;
    const int row = lane() % Base::kRows;
    const bool exists = (rows_.existing >> row & 1) != 0 && lane() < 2 * Base::kRows;
    const unsigned char* from = shuffled_pointer(rows_.own, row) + Widening::kContentDims +
                                (part * 2 + lane() / Base::kRows) * 4;
    return __uint_as_float(load(from, exists ? 4 : 0).x);
  }
  /// The first `num_bytes` of the 16 bytes at `from`; zeros in place of the others.
  static FLASHPLAN_DEVICE uint4 load(const unsigned char* from, int num_bytes) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < num_bytes) words[i / 4] |= uint32_t{from[i]} << i % 4 * 8;
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

/// Runs warp `warp` of the producer. It is not inlined, so that it takes no registers from other
/// code.
template <typename S>
__device__ __noinline__ void widen_unaligned_rows(const AttentionParams& p, const MlaSmem<S>& smem,
                                                  int warp, uint32_t queue_word) {
  MlaUnalignedLoader<S>(p, smem, warp).run(queue_word);
}

}  // namespace flashplan::device
