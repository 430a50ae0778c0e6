// SPDX-License-Identifier: Apache-2.0
// What the warps of the sm90_mla producer that widen keys of 8 bits have in common.
#pragma once

#include "kernels/device/sm90/mla/key_loader.h"
#include "kernels/device/sm90/mla/key_places.h"
#include "kernels/device/sm90/mla/record_loader.h"
#include "kernels/device/sm90/mla/widening.h"

namespace flashplan::device {

/// Warp w has rows [16 w, 16 w + 16) of each block. In both parts of a slot, the memory of these
/// rows is contiguous, and only this warp writes to it, so no warp has to wait for another one.
/// Each lane looks up one row; the lanes that load the row get its address from that lane by a
/// shuffle.
///
/// In a pair of CTAs, warp w of CTA c has the 8 rows from 32 c + 8 w on. It stores them to its own
/// slot, and copies them from there to the other CTA. The other CTA's mbarriers count the bytes of
/// these copies, so this CTA need not arrive there. Both CTAs walk over the same blocks, and each
/// finds out about all 64 rows whether they exist: the upper lanes of a warp look up the rows of
/// warp w of the other CTA.
///
/// An item is 16 neighbouring dims of a row, which one lane widens. Of each 8 rows by 64 dims, lane
/// i has the item of row i / 4 that begins at dim i % 4 * 16. So a lane needs few addresses: in the
/// cache, its items of a row lie 64 dims apart, and in shared memory, its widened items lie at
/// fixed distances from the first one (`place_`).
template <typename S>
class MlaWideningWarp : protected MlaKeyWarp<S> {
  using Base = MlaKeyWarp<S>;

 public:
  FLASHPLAN_DEVICE MlaWideningWarp(const AttentionParams& p, const MlaSmem<S>& smem, int warp)
      : Base(p, smem),
        places_(p),
        warp_(warp),
        first_row_(warp * kRows + first_row_of_pair()),
        place_(S::Half::offset(loaded_row(), 2 * chunk())),
        to_other_cta_(
            uniform(S::kPairs ? address_in_cta(smem.base, cluster_rank() ^ 1) - smem.base : 0)) {}

 protected:
  using Base::lane_;
  using Base::p_;
  using Base::smem_;
  using typename Base::Block;
  using Widening = MlaWidening<S::kQ, S::kKv>;

  static constexpr int kRows = S::kTileKv / (S::kWideningWarps * S::kCtas);
  static_assert(kRows * S::kCtas == 16 && S::kHeadDimVo == Widening::kContentDims);
  static constexpr int kGroups = kRows / 8;
  static constexpr int kItems = S::kHalfDims / 64;  // a lane's items in half of the dims of 8 rows
  static constexpr bool kHasTail = S::kTailDims > 0;
  static constexpr bool kTailHas8Bits = kHasTail && Widening::kTailBytes == 1;

  /// The rows of a block that the warp has.
  struct Rows {
    // In lane i < kRows: the address of row i; in lane kRows + i: the address of its tail.
    const unsigned char* own;
    // Bit i < kRows: whether row i exists: a query sees its key, which is in the cache. Rows that
    // do not exist become zeros. In pairs, bit 16 + i tells this of row i of the other CTA's warp.
    uint32_t existing;
  };

  /// Walks over the blocks of the queue's tiles, and calls these functions in this order:
  ///   begin(number, block_after)           for the first block of a tile, when `rows_` has the
  ///                                        rows of this block
  ///   start(number)                        for the first block of a tile, when `next_` also has
  ///                                        the rows of the second block
  ///   fill(number, has_next, block_after)  for each block of a tile. `rows_` has the rows of this
  ///                                        block, and `next_` those of the next block. fill()
  ///                                        returns the rows of the block after the next one.
  /// `number` is the number of the block in the queue. `has_next` says whether the tile has a next
  /// block. block_after(n) returns the block that comes n blocks after the current one. The warp
  /// with number kRecordWarp also brings the records of the tiles and their queries. `queue_word`:
  /// this lane's word of QueueStart, from MlaRecordLoader::request_queue().
  template <typename Begin, typename Start, typename Fill>
  FLASHPLAN_DEVICE void for_each_slot(uint32_t queue_word, Begin begin, Start start, Fill fill) {
    MlaRecordLoader<S> records(p_, smem_);
    const bool brings_records = warp_ == S::kRecordWarp;
    if (brings_records) records.begin_queue(queue_word);
    const auto begin_tile = [&](int32_t i) {
      if (brings_records) records.load_records(i);
    };
    uint32_t number = 0;
    using Keys = typename Base::Keys;
    const auto fill_blocks = [&](const Keys& keys, const Sm90Context& context,
                                 const auto& block_at) {
      const int32_t end = keys.end;
      int32_t key = keys.begin;
      const int32_t id = request(block_at(key));
      const int32_t next_id = request(block_at(key + S::kTileKv));
      const auto block_after = [&](int n) { return block_at(key + n * S::kTileKv); };
      if (brings_records) records.load_queries(context);
      rows_ = find(block_at(key), id);
      begin(number, block_after);
      next_ = find(block_after(1), next_id);
      start(number);
#pragma unroll 1
      do {
        const Rows later = fill(number++, key + S::kTileKv < end, block_after);
        key += S::kTileKv;
        rows_ = next_;
        next_ = later;
      } while (key < end);
    };
    Base::for_each_tile(begin_tile, fill_blocks);
  }

  /// Returns `x`, which all lanes have. The shuffle tells the compiler that they agree, so that it
  /// keeps the value in a uniform register.
  static FLASHPLAN_DEVICE uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffU, x, 0); }
  static constexpr int kRowsOfCta = S::kTileKv / S::kCtas;
  /// The first row of a block that this CTA widens.
  static FLASHPLAN_DEVICE int first_row_of_pair() {
    return S::kPairs ? static_cast<int>(uniform(cluster_rank())) * kRowsOfCta : 0;
  }

  // The next functions are called anew wherever their results are used, because no register is left
  // to keep the results in.
  /// The mask tells the compiler that lanes are not negative, which saves instructions. Without
  /// pairs it costs a register too many: numbers are then spilled in the loop.
  FLASHPLAN_DEVICE int lane() const { return S::kPairs ? opaque(lane_) & 31 : opaque(lane_); }
  FLASHPLAN_DEVICE int own_row() const {
    const int of_warp = S::kPairs ? first_row_ ^ lane() / 16 * kRowsOfCta : first_row_;
    return of_warp + lane() % kRows;
  }
  /// The row of a group that this lane widens.
  FLASHPLAN_DEVICE int loaded_row() const { return lane() / 4; }
  /// Which 16 of each 64 dims this lane widens.
  FLASHPLAN_DEVICE int chunk() const { return lane() % 4; }

  FLASHPLAN_DEVICE int32_t request(const Block& block) const {
    const int row = own_row();
    return row < block.count ? places_.request(block.kv_row, block.key + row) : 0;
  }
  /// Finds the rows of a block. Zeros replace rows past the last key, rows of keys that no query
  /// sees, and rows of keys that are not in the cache: what lies there may be NaN, and 0 * NaN is
  /// NaN. Their address becomes that of q, from which anything may be loaded.
  FLASHPLAN_DEVICE Rows find(const Block& block, int32_t id) const {
    const int row = own_row();
    KeyPlace place = places_.find(block.kv_row, block.key + row, id);
    const bool is_seen = row >= block.num_hidden && row < block.count;
    if (!places_.are_listed()) Base::report_pages(place.exists || !is_seen);
    const bool exists = is_seen && place.exists;
    if (!exists) place = {0, 0, false};
    const KvView& view = p_.tensors.k;
    const auto* own = static_cast<const unsigned char*>(view.data) + place.offset(view);
    if (lane() >= kRows) own += Widening::kTailOffset;
    if (kTailHas8Bits && p_.tails.k.num_dims > 0 && lane() >= kRows) {
      const KvView& tails = p_.tails.k.view;
      own = static_cast<const unsigned char*>(tails.data) + place.offset(tails);
    }
    if (!exists) own = static_cast<const unsigned char*>(p_.tensors.q.data);
    return {own, __ballot_sync(0xffffffffU, exists)};
  }
  /// Brings rows to the L2 cache. Two lanes have looked up a row; each brings every other 64 bytes.
  /// If tails are in a tensor of their own, the second lane brings the tail instead.
  FLASHPLAN_DEVICE void prefetch(const Rows& rows) const {
    constexpr int kTailBytes = S::kTailDims * Widening::kTailBytes;
    constexpr int kRowBytes =
        kHasTail ? Widening::kTailOffset + kTailBytes : Widening::kContentDims;
    if ((rows.existing >> lane() % kRows & 1) == 0 || lane() >= 2 * kRows) return;
    const unsigned char* from = rows.own;
    int last = kRowBytes - 1;
    if (kTailHas8Bits && p_.tails.k.num_dims > 0) {
      last = (lane() < kRows ? Widening::kContentDims : kTailBytes) - 1;
    } else if (lane() >= kRows) {
      from -= Widening::kTailOffset - 64;
      last -= 64;
    }
#pragma unroll
    for (int byte = 0; byte < kRowBytes; byte += 128) prefetch_l2(from + min(byte, last));
  }
  /// Addresses in the cache for a group of 8 rows. content(): this lane's first item of its row;
  /// tail(): this lane's item of the row's tail.
  FLASHPLAN_DEVICE const unsigned char* content(const Rows& rows, int group) const {
    return shuffled_pointer(rows.own, loaded_row() + 8 * group) + chunk() * 16;
  }
  FLASHPLAN_DEVICE const unsigned char* tail(const Rows& rows, int group) const {
    return shuffled_pointer(rows.own, kRows + loaded_row() + 8 * group) + chunk() * 16;
  }
  FLASHPLAN_DEVICE bool exists(const Rows& rows, int group) const {
    return (rows.existing >> (loaded_row() + 8 * group) & 1) != 0;
  }

  /// For lists of keys, tells the consumers which rows of the block exist.
  FLASHPLAN_DEVICE void report_found(uint32_t number, const Rows& rows) const {
    if (!places_.are_listed() || lane() >= 2) return;
    const int group =
        S::kPairs ? first_row_ / 8 ^ lane() * (kRowsOfCta / 8) : first_row_ / 8 + lane();
    smem_.memory.found[number % S::kSlots][group] =
        static_cast<uint8_t>(rows.existing >> (S::kPairs ? 16 : 8) * lane());
  }
  /// Announces what the warp has stored to a part of a slot. In pairs, the warp also copies these
  /// rows to the other CTA, and makes this CTA's mbarrier expect the bytes that the same warp of
  /// the other CTA copies here. Tails then belong to the left part, as right parts are freed later.
  FLASHPLAN_DEVICE void announce(uint32_t number, int part) const {
    const uint32_t full = smem_.full(number, part).barrier;
    if constexpr (S::kPairs) {
      fence_async_proxy();
      __syncwarp();
      if (lane() != 0) return;
      constexpr int kHalfBytes = kRows * S::kHalfDims * 2;
      constexpr int kTailBytes = kRows * S::kTailDims * 2;
      send(own_half(number, part), kHalfBytes, full);
      if (part == 0) send(own_tail(number), kTailBytes, full);
      mbarrier_arrive_expect(full, part == 0 ? kHalfBytes + kTailBytes : kHalfBytes);
    } else {
      __syncwarp();
      if (lane() == 0) mbarrier_arrive(full);
    }
  }
  /// Copies bytes to their place in the other CTA.
  FLASHPLAN_DEVICE void send(uint32_t from, int bytes, uint32_t full) const {
    bulk_send(from + to_other_cta_, from, bytes, full + to_other_cta_);
  }

  /// The scale of an item. `scales`: lane i passes the scale of row i % kRows for the 128 dims from
  /// i / kRows * 128 on, counted from the dims of item 0, or 0 if the row does not exist. All lanes
  /// call it.
  FLASHPLAN_DEVICE float scale_of(float scales, int group, int item) const {
    if constexpr (!Widening::kHasScales) return 1.0F;
    return __shfl_sync(0xffffffffU, scales, item / 2 * kRows + loaded_row() + 8 * group);
  }

  /// own_half(): the memory of this warp's rows in a half; own_tail(): that in the tail.
  FLASHPLAN_DEVICE uint32_t own_half(uint32_t number, int part) const {
    return smem_.half(number, part) + S::Half::offset(first_row_, 0);
  }
  FLASHPLAN_DEVICE uint32_t own_tail(uint32_t number) const {
    return smem_.tail(number) + S::Tail::offset(first_row_, 0);
  }
  /// Widens an item, and stores it. `to`: where the block of 8 rows by 64 dims that has it begins.
  FLASHPLAN_DEVICE void store_widened(uint32_t to, uint4 bytes, float scale) const {
    const uint2 a = Widening::content(bytes.x, scale);
    const uint2 b = Widening::content(bytes.y, scale);
    store_shared_16(to + place_, {a.x, a.y, b.x, b.y});
    const uint2 c = Widening::content(bytes.z, scale);
    const uint2 d = Widening::content(bytes.w, scale);
    store_shared_16((to + place_) ^ 16, {c.x, c.y, d.x, d.y});  // the next 8 dims
  }
  static FLASHPLAN_DEVICE uint32_t place_in_half(int group, int item) {
    return group * S::Half::kGroupBytes + item * S::Half::kBlockBytes;
  }

  // A tail of 16 bits is copied as it is, four rows at a time.
  static constexpr int kTailCopies = kHasTail && !kTailHas8Bits ? kRows / 4 : 0;
  /// Of the 16 bytes of copy number `i` of this lane: copied_tail(): their address in the cache;
  /// exists_copied(): whether their row exists; tail_place(): their place in the slot.
  FLASHPLAN_DEVICE const unsigned char* copied_tail(const Rows& rows, int i) const {
    return shuffled_pointer(rows.own, kRows + i * 4 + lane() / 8) + lane() % 8 * 16;
  }
  FLASHPLAN_DEVICE bool exists_copied(const Rows& rows, int i) const {
    return (rows.existing >> (i * 4 + lane() / 8) & 1) != 0;
  }
  FLASHPLAN_DEVICE uint32_t tail_place(uint32_t number, int i) const {
    return own_tail(number) + S::Tail::offset(i * 4 + lane() / 8, lane() % 8);
  }
  /// Turns 8 numbers of a copied tail into those of the dtype of q.
  static FLASHPLAN_DEVICE uint4 converted_tail(uint4 pairs) {
    return {Widening::tail(pairs.x), Widening::tail(pairs.y), Widening::tail(pairs.z),
            Widening::tail(pairs.w)};
  }

  const KeyPlaces places_;
  const int warp_;
  const int first_row_;          // the warp's first row of a block
  const uint32_t place_;         // offset of this lane's item in a group of 8 rows and 64 dims
  const uint32_t to_other_cta_;  // address of a place in the other CTA, minus its address here
  Rows rows_ = {};               // rows of the block that is stored
  Rows next_ = {};               // rows of the next block of the tile
};

}  // namespace flashplan::device
