// SPDX-License-Identifier: Apache-2.0
// What the warps of the sm90_mla producer that widen keys of 8 bits have in common.
#pragma once

#include "kernels/device/sm90/mla/key_loader.h"
#include "kernels/device/sm90/mla/key_places.h"
#include "kernels/device/sm90/mla/record_loader.h"
#include "kernels/device/sm90/mla/widening.h"

namespace flashplan::device {

/// Warp w has rows [16 w, 16 w + 16) of each block. In both parts of a slot, the memory of these
/// rows lies together, so no warp has to wait for another one. Each lane looks up one row; the
/// lanes that load the row get its address from that lane by a shuffle.
///
/// Lanes widen items of 16 numbers of a row. Of each 8 rows and 64 dims, lane i has one item, in
/// row i / 4. So all that a lane loads and stores lies at fixed distances from two addresses in the
/// cache and one in shared memory.
template <typename S>
class MlaWideningWarp : protected MlaKeyWarp<S> {
  using Base = MlaKeyWarp<S>;

 public:
  FLASHPLAN_DEVICE MlaWideningWarp(const AttentionParams& p, const MlaSmem<S>& smem, int warp)
      : Base(p, smem),
        places_(p),
        first_row_(warp * kRows),
        place_(S::Half::offset(loaded_row(), 2 * chunk())) {}

 protected:
  using Base::lane_;
  using Base::p_;
  using Base::smem_;
  using typename Base::Block;
  using Widening = MlaWidening<S::kQ, S::kKv>;

  static constexpr int kRows = S::kTileKv / S::kWideningWarps;
  static_assert(kRows == 16 && S::kHeadDimVo == Widening::kContentDims);
  static constexpr int kGroups = kRows / 8;
  static constexpr int kItems = S::kHalfDims / 64;  // of a lane, in a group of 8 rows and a half
  static constexpr bool kHasTail = S::kTailDims > 0;
  static constexpr bool kTailHas8Bits = kHasTail && Widening::kTailBytes == 1;

  /// The rows of a block that the warp has.
  struct Rows {
    const unsigned char* own;  // lane i < 16: row i; lane 16 + i: the tail of row i
    uint32_t existing;         // bit i: whether row i exists; others become zeros
  };

  /// Walks over the blocks of the queue; the warp with number kRecordWarp also brings the records
  /// of tiles and their queries. For the first block of each tile this calls begin(number,
  /// block_after), with the block's rows in `rows_`. For each block it then calls fill(number,
  /// has_next, block_after), with the block's rows in `rows_` and those of the next block in
  /// `next_`; fill() returns the rows of the block after the next one. `number`: of the block in
  /// the queue. `has_next`: whether the tile has a next block. block_after(n) is the n-th block
  /// after this one. `queue_word`: what MlaRecordLoader::request_queue() returned.
  template <typename Begin, typename Fill>
  FLASHPLAN_DEVICE void for_each_slot(uint32_t queue_word, Begin begin, Fill fill) {
    MlaRecordLoader<S> records(p_, smem_);
    const bool brings_records = first_row_ == S::kRecordWarp * kRows;
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

  // The next functions are called wherever their results are used: no register is left to keep
  // them.
  FLASHPLAN_DEVICE int lane() const { return opaque(lane_); }
  FLASHPLAN_DEVICE int own_row() const { return first_row_ + lane() % kRows; }
  /// The row of a group that this lane widens.
  FLASHPLAN_DEVICE int loaded_row() const { return lane() / 4; }
  /// Which 16 numbers of each 64 this lane widens.
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
    return {own, __ballot_sync(0xffffffffU, exists) & 0xffffU};
  }
  /// Where this lane's items of a group begin, and those of the tail.
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
  FLASHPLAN_DEVICE void report_found(uint32_t number) const {
    if (!places_.are_listed() || lane() >= kGroups) return;
    smem_.memory.found[number % S::kSlots][first_row_ / 8 + lane()] =
        static_cast<uint8_t>(rows_.existing >> 8 * lane());
  }
  FLASHPLAN_DEVICE void announce(uint32_t number, int part) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(smem_.full(number, part).barrier);
  }

  /// The scale of an item of a half. `scales`: that of row i % 16 in lane i, of the half's first
  /// 128 dims where i < 16 and of the others elsewhere; 0 for rows that do not exist. All lanes
  /// call it.
  FLASHPLAN_DEVICE float scale_of(float scales, int group, int item) const {
    if constexpr (!Widening::kHasScales) return 1.0F;
    return __shfl_sync(0xffffffffU, scales, item / 2 * kRows + loaded_row() + 8 * group);
  }

  /// The memory of this warp's rows in a half, and in the tail.
  FLASHPLAN_DEVICE uint32_t own_half(uint32_t number, int part) const {
    return smem_.half(number, part) + S::Half::offset(first_row_, 0);
  }
  FLASHPLAN_DEVICE uint32_t own_tail(uint32_t number) const {
    return smem_.tail(number) + S::Tail::offset(first_row_, 0);
  }
  /// Widens an item, and stores it. `to`: where the 64 dims of its group begin.
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
  /// The 16 bytes of copy number `i` of this lane in the cache, whether their row exists, and where
  /// they go in the slot.
  FLASHPLAN_DEVICE const unsigned char* copied_tail(const Rows& rows, int i) const {
    return shuffled_pointer(rows.own, kRows + i * 4 + lane() / 8) + lane() % 8 * 16;
  }
  FLASHPLAN_DEVICE bool exists_copied(const Rows& rows, int i) const {
    return (rows.existing >> (i * 4 + lane() / 8) & 1) != 0;
  }
  FLASHPLAN_DEVICE uint32_t tail_place(uint32_t number, int i) const {
    return own_tail(number) + S::Tail::offset(i * 4 + lane() / 8, lane() % 8);
  }
  /// Turns copies that this lane has made into numbers of the dtype of q.
  FLASHPLAN_DEVICE void convert_copied_tail(uint32_t number) const {
    if constexpr (S::kQ != DType::kBFloat16) {
#pragma unroll
      for (int i = 0; i < kTailCopies; ++i) {
        const uint32_t place = tail_place(number, i);
        const uint4 pairs = load_shared_16(place);
        store_shared_16(place, {Widening::tail(pairs.x), Widening::tail(pairs.y),
                                Widening::tail(pairs.z), Widening::tail(pairs.w)});
      }
    }
  }

  const KeyPlaces places_;
  const int first_row_;   // the warp's first row of a block
  const uint32_t place_;  // of this lane's item, in 8 rows of 64 dims
  Rows rows_ = {};        // of the block that is stored
  Rows next_ = {};        // of the next block of the tile
};

}  // namespace flashplan::device
