// SPDX-License-Identifier: Apache-2.0
// The warps of the sm90_mla producer that bring keys of 8 bits, and widen them.
#pragma once

#include "kernels/device/sm90/mla/key_loader.h"
#include "kernels/device/sm90/mla/key_places.h"
#include "kernels/device/sm90/mla/record_loader.h"
#include "kernels/device/sm90/mla/widening.h"

namespace flashplan::device {

/// Four warps load rows of every block to registers, 16 bytes in a lane, and store them, widened,
/// as wgmma reads them. Warp w has rows [16 w, 16 w + 16) of a block. A lane looks up one of them,
/// and the other lanes get its address by a shuffle.
///
/// What a lane loads of a block are its items: first those of the left half of the values, then
/// those of the right half, then those of a tail of 8 bits. Items are loaded in groups, which take
/// turns: when the first item of a group is stored, all of the next group are loaded, so that bytes
/// are under way while others are widened and while a block waits for its slot. Loads of single
/// items would all be waited for together: the compiler counts them in one scoreboard. Long before,
/// a whole block is brought to the L2 cache.
///
/// `kVectorized`: rows can be loaded 16 bytes at a time. Others are loaded when they are stored.
template <typename S, bool kVectorized>
class MlaWideningLoader : MlaKeyWarp<S> {
  using Base = MlaKeyWarp<S>;
  using Block = typename Base::Block;
  using Widening = MlaWidening<S::kQ, S::kKv>;

 public:
  FLASHPLAN_DEVICE MlaWideningLoader(const AttentionParams& p, const MlaSmem<S>& smem, int warp)
      : Base(p, smem), places_(p), first_row_(warp * kRows) {}

  /// `queue_word`: what MlaRecordLoader::request_queue() returned.
  FLASHPLAN_DEVICE void run(uint32_t queue_word) {
    MlaRecordLoader<S> records(p_, smem_);
    const bool brings_records = first_row_ == S::kRecordWarp * kRows;
    bool needs_queries = false;  // of the current tile, from this warp
    int32_t tile = 0;
    if (brings_records) records.begin_queue(queue_word);
    const auto begin_tile = [&](int32_t i) {
      if (brings_records) records.load_records(i);
      needs_queries = brings_records;
      tile = i;
    };
    const auto request = [&](const Block& block) {
      const int row = own_row();
      return row < block.count ? places_.request(block.kv_row, block.key + row) : 0;
    };
    const auto prefetch_next = [&](const Block& next, int32_t id) {
      if constexpr (kVectorized) next_ = find(next, id);
    };
    const auto fill = [&](const Block& block, uint32_t number, int32_t id) {
      if (!is_begun_) begin(find(block, id));
      // Queries are loaded when the first keys of the tile are under way.
      if (needs_queries) records.load_queries(smem_.memory.contexts[tile % S::kContexts]);
      needs_queries = false;
      fill_slot(number);
    };
    Base::for_each_block(request, prefetch_next, fill, begin_tile);
  }

 private:
  using Base::lane_;
  using Base::p_;
  using Base::smem_;

  static constexpr int kRows = S::kTileKv / S::kWideningWarps;
  static_assert(kRows == 16 && S::kHeadDimVo == Widening::kContentDims);
  // An item of a half is 128 dims of 4 rows, one of the tail all of its dims of 8 rows.
  static constexpr int kItemsOfHalf = 8;
  static constexpr bool kHasTail = S::kTailDims > 0;
  static constexpr bool kTailHas8Bits = kHasTail && Widening::kTailBytes == 1;
  static constexpr int kItems = 2 * kItemsOfHalf + (kTailHas8Bits ? kRows / 8 : 0);
  // Two groups have as many items as there are registers for.
  static constexpr int kAhead = kItems / 2;
  static constexpr int kFirstGroup = (kAhead + 1) / 2;
  static_assert(kItems % kAhead == 0);

  /// The rows of a block that the warp has.
  struct Rows {
    const unsigned char* own;  // lane i < 16: row i; lane 16 + i: the tail of row i
    uint32_t existing;         // bit i: whether row i exists; others become zeros
  };

  FLASHPLAN_DEVICE int own_row() const { return first_row_ + lane_ % kRows; }
  FLASHPLAN_DEVICE bool has_own_tail() const { return kTailHas8Bits && p_.tails.k.num_dims > 0; }

  /// Finds the rows of a block, and brings them to the L2 cache. Zeros replace rows past the last
  /// key, rows of keys that no query sees, and rows of keys that are not in the cache: what lies
  /// there may be NaN, and 0 * NaN is NaN.
  FLASHPLAN_DEVICE Rows find(const Block& block, int32_t id) const {
    const KvView& view = p_.tensors.k;
    const int row = own_row();
    KeyPlace place = places_.find(block.kv_row, block.key + row, id);
    const bool is_seen = row >= block.num_hidden && row < block.count;
    if (!places_.are_listed()) Base::report_pages(place.exists || !is_seen);
    const bool exists = is_seen && place.exists;
    if (!exists) place = {0, 0, false};
    const auto* content = static_cast<const unsigned char*>(view.data) + place.offset(view);
    const unsigned char* tail = content + Widening::kTailOffset;
    if (has_own_tail()) {
      const KvView& own = p_.tails.k.view;
      tail = static_cast<const unsigned char*>(own.data) + place.offset(own);
    }
    if (exists && kVectorized) prefetch(content, tail);
    return {lane_ < kRows ? content : tail, __ballot_sync(0xffffffffU, exists) & 0xffffU};
  }
  /// Brings a row to the L2 cache. Two lanes have looked it up; each brings every other 64 bytes.
  FLASHPLAN_DEVICE void prefetch(const unsigned char* content, const unsigned char* tail) const {
    constexpr int kBytes = Widening::kTailOffset + S::kTailDims * Widening::kTailBytes;
    const int last = (has_own_tail() ? Widening::kContentDims : kBytes) - 1;
    const int upper = lane_ / kRows;
#pragma unroll
    for (int byte = 0; byte < kBytes; byte += 128) {
      prefetch_l2(content + min(byte + upper * 64, last));
    }
    if (has_own_tail()) prefetch_l2(tail + upper * (S::kTailDims - 1));
  }

  FLASHPLAN_DEVICE void begin_loading(const Rows& rows) {
    rows_ = rows;
    scales_[0] = load_scale(0);
  }
  /// Loads the first items of a block whose predecessor has not done so.
  FLASHPLAN_DEVICE void begin(const Rows& rows) {
    begin_loading(rows);
    scales_[1] = load_scale(1);
    if constexpr (kVectorized) {
#pragma unroll
      for (int item = 0; item < kFirstGroup; ++item) ahead_[item] = load(item);
    }
  }

  FLASHPLAN_DEVICE void fill_slot(uint32_t number) {
    if constexpr (kVectorized) {
      float right_scale = 0.0F;  // that of the next block
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (item == 0) begin_left(number);
        if (item == kItemsOfHalf) begin_right(number);
        store(item, number, ahead_[item % kAhead]);
        const bool begins_first = item % kAhead == 0;
        if (begins_first || item % kAhead == kFirstGroup) {
          __syncwarp();  // the compiler would move the loads
          const int begin = item + (begins_first ? kFirstGroup : kAhead - kFirstGroup);
          if (begin == kItems) {
            begin_loading(next_);
            right_scale = load_scale(1);
          }
#pragma unroll
          for (int i = begin; i < item + kAhead; ++i) ahead_[i % kAhead] = load(i % kItems);
          __syncwarp();
        }
        if (item == kItemsOfHalf - 1) announce(number, 0);
      }
      scales_[1] = right_scale;
      is_begun_ = rows_.existing != 0;
    } else {
#pragma unroll 1
      for (int item = 0; item < kItems; ++item) {
        if (item == 0) begin_left(number);
        if (item == kItemsOfHalf) begin_right(number);
        store(item, number, load(item));
        if (item == kItemsOfHalf - 1) announce(number, 0);
      }
    }
    if constexpr (kHasTail && !kTailHas8Bits) finish_tail(number);
    announce(number, 1);
  }
  FLASHPLAN_DEVICE void begin_left(uint32_t number) const {
    Base::wait(smem_.emptied(number, 0));
    if (places_.are_listed() && lane_ < kRows / 8) {
      smem_.memory.found[number % S::kSlots][first_row_ / 8 + lane_] =
          static_cast<uint8_t>(rows_.existing >> 8 * lane_);
    }
  }
  FLASHPLAN_DEVICE void begin_right(uint32_t number) const {
    Base::wait(smem_.emptied(number, 1));
    if constexpr (kHasTail && !kTailHas8Bits) copy_tail(number);
  }
  FLASHPLAN_DEVICE void announce(uint32_t number, int part) const {
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(smem_.full(number, part).barrier);
  }

  // A tail of 16 bits is copied as it is. It arrives while the right half is widened.
  /// The row and the 16 bytes of copy number `i` of this lane.
  FLASHPLAN_DEVICE uint32_t tail_place(uint32_t number, int i) const {
    return smem_.tail(number) + S::Tail::offset(first_row_ + i * 4 + lane_ / 8, lane_ % 8);
  }
  FLASHPLAN_DEVICE void copy_tail(uint32_t number) const {
#pragma unroll 1
    for (int i = 0; i < kRows / 4; ++i) {
      const int row = i * 4 + lane_ / 8;
      const unsigned char* from = shuffled_pointer(rows_.own, kRows + row) + lane_ % 8 * 16;
      const bool exists = (rows_.existing >> row & 1) != 0;
      if constexpr (kVectorized) {
        cp_async_16_padded(tail_place(number, i), from, exists ? 16 : 0);
      } else {
        store_shared_16(tail_place(number, i), load_unaligned_16(from, exists ? 16 : 0));
      }
    }
  }
  FLASHPLAN_DEVICE void finish_tail(uint32_t number) const {
    if constexpr (kVectorized) cp_async_wait_all();
    if constexpr (S::kQ != DType::kBFloat16) {
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const uint32_t place = tail_place(number, i);
        const uint4 pairs = load_shared_16(place);
        store_shared_16(place, {Widening::tail(pairs.x), Widening::tail(pairs.y),
                                Widening::tail(pairs.z), Widening::tail(pairs.w)});
      }
    }
  }

  /// The scales of a half, two for each row: lane i has that of row i % 16, dims from 128 * (i /
  /// 16) on.
  FLASHPLAN_DEVICE float load_scale(int part) const {
    if constexpr (!Widening::kHasScales) return 1.0F;
    const unsigned char* from = shuffled_pointer(rows_.own, lane_ % kRows) +
                                Widening::kContentDims + (part * 2 + lane_ / kRows) * 4;
    const bool exists = (rows_.existing >> lane_ % kRows & 1) != 0;
    if constexpr (kVectorized) {
      return load_if(exists, reinterpret_cast<const float*>(from), 0.0F);
    }
    return exists ? __uint_as_float(load_unaligned_16(from, 4).x) : 0.0F;
  }

  // The layout of items: which 16 bytes of which row a lane has. Eight neighbouring lanes store
  // without bank conflicts. What follows from the lane is computed where it is used: kept, it would
  // take more registers than there are.
  static FLASHPLAN_DEVICE bool is_tail(int item) { return item >= 2 * kItemsOfHalf; }
  /// How many rows lie before those of an item.
  static FLASHPLAN_DEVICE int rows_before(int item) {
    return is_tail(item) ? (item - 2 * kItemsOfHalf) * 8 : item % kItemsOfHalf / 2 * 4;
  }
  /// Which row of an item this lane has, behind rows_before(item), and which 16 bytes of that row.
  struct Own {
    int row;
    int chunk;
  };
  FLASHPLAN_DEVICE Own own(int item) const {
    const int lane = opaque(lane_);
    if (is_tail(item)) return {lane / 4, lane % 4};
    return {lane / 16 * 2 + lane / 4 % 2, lane / 8 % 2 * 4 + lane % 4};
  }

  FLASHPLAN_DEVICE uint4 load(int item) const {
    const Own at = own(item);
    const int before = rows_before(item);
    const int dims = is_tail(item) ? 0 : item / kItemsOfHalf * 256 + item % 2 * 128;
    const unsigned char* from =
        shuffled_pointer(rows_.own, (is_tail(item) ? kRows : 0) + before + at.row) + dims +
        at.chunk * 16;
    const bool exists = (rows_.existing >> at.row >> before & 1) != 0;
    if constexpr (kVectorized) return load_16_if(exists, from);
    return load_unaligned_16(from, exists ? 16 : 0);
  }
  static FLASHPLAN_DEVICE uint4 load_unaligned_16(const unsigned char* from, int num_bytes) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < num_bytes) words[i / 4] |= uint32_t{from[i]} << i % 4 * 8;
    }
    return {words[0], words[1], words[2], words[3]};
  }

  /// Widens an item, and stores it.
  FLASHPLAN_DEVICE void store(int item, uint32_t number, uint4 bytes) const {
    const Own at = own(item);
    const int before = rows_before(item);
    const int group = first_row_ + before / 8 * 8;
    if (is_tail(item)) {
      store_widened(
          smem_.tail(number) + S::Tail::offset(group, 0) + S::Tail::offset(at.row, 2 * at.chunk),
          bytes, 1.0F);
      return;
    }
    // Rows swap their 16-byte groups in eights (WgmmaTile), so 4 rows further the groups differ.
    const uint32_t place =
        before % 8 * 128 + (S::Half::offset(at.row, 2 * at.chunk) ^ before % 8 * 16);
    float scale = 1.0F;
    if constexpr (Widening::kHasScales) {
      scale = __shfl_sync(0xffffffffU, item < kItemsOfHalf ? scales_[0] : scales_[1],
                          item % 2 * kRows + before + at.row);
    }
    store_widened(
        smem_.half(number, item / kItemsOfHalf) + S::Half::offset(group, item % 2 * 16) + place,
        bytes, scale);
  }
  static FLASHPLAN_DEVICE void store_widened(uint32_t to, uint4 bytes, float scale) {
    const uint2 a = Widening::content(bytes.x, scale);
    const uint2 b = Widening::content(bytes.y, scale);
    store_shared_16(to, {a.x, a.y, b.x, b.y});
    const uint2 c = Widening::content(bytes.z, scale);
    const uint2 d = Widening::content(bytes.w, scale);
    store_shared_16(to ^ 16, {c.x, c.y, d.x, d.y});  // the next 8 dims
  }

  const KeyPlaces places_;
  const int first_row_;    // the warp's first row of a block
  Rows rows_ = {};         // that are loaded now
  Rows next_ = {};         // of the next block of the tile
  bool is_begun_ = false;  // the first items of the block are loaded
  uint4 ahead_[kVectorized ? kAhead : 1] = {};
  float scales_[2] = {};  // of this lane's row, left and right
};

}  // namespace flashplan::device
