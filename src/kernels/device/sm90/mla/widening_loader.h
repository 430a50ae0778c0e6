// SPDX-License-Identifier: Apache-2.0
// The warps of the sm90_mla producer that bring keys of 8 bits, and widen them.
#pragma once

#include "kernels/device/sm90/mla/key_loader.h"
#include "kernels/device/sm90/mla/key_places.h"
#include "kernels/device/sm90/mla/record_loader.h"
#include "kernels/device/sm90/mla/widening.h"

namespace flashplan::device {

/// Four warps load rows of every block to registers, 16 bytes in a lane, and store them, widened,
/// as wgmma reads them. Warp w has rows [16 w, 16 w + 16) of a block, and a lane a quarter of each
/// 64 dims of two rows, 8 apart. So what it loads and stores lies at fixed distances from two
/// addresses in the cache and one in shared memory. A lane looks up one row; the lanes that load it
/// get its address by a shuffle.
///
/// What a lane loads of a block are its items: first those of the left half of the values, then
/// those of the right half, then those of a tail of 8 bits. Items are loaded in groups, which take
/// turns in registers: when a group is stored, the one after the next is loaded. So bytes are under
/// way while others are widened and while a block waits for its slot. Long before, a whole block is
/// brought to the L2 cache.
///
/// How loads are waited for is up to the compiler. It waits for all loads that are under way across
/// a branch at once. So there is no branch between the first store to a slot and the last one,
/// loads have no condition, and no registers are spilled there.
///
/// `kVectorized`: rows can be loaded 16 bytes at a time. Others are loaded when they are stored.
template <typename S, bool kVectorized>
class MlaWideningLoader : MlaKeyWarp<S> {
  using Base = MlaKeyWarp<S>;
  using Block = typename Base::Block;
  using Widening = MlaWidening<S::kQ, S::kKv>;

 public:
  FLASHPLAN_DEVICE MlaWideningLoader(const AttentionParams& p, const MlaSmem<S>& smem, int warp)
      : Base(p, smem),
        places_(p),
        first_row_(warp * kRows),
        place_(S::Half::offset(loaded_row(), 2 * chunk())) {}

  /// `queue_word`: what MlaRecordLoader::request_queue() returned.
  FLASHPLAN_DEVICE void run(uint32_t queue_word) {
    MlaRecordLoader<S> records(p_, smem_);
    const bool brings_records = first_row_ == S::kRecordWarp * kRows;
    if (brings_records) records.begin_queue(queue_word);
    const auto begin_tile = [&](int32_t i) {
      if (brings_records) records.load_records(i);
    };
    uint32_t number = 0;
    const auto fill_blocks = [&](int32_t, const Sm90Context& context, const auto& block_at) {
      const int32_t end = context.tile.kv_end;
      int32_t key = context.tile.kv_begin;
      int32_t id = request(block_at(key));
      int32_t next_id = request(block_at(key + S::kTileKv));
      if (brings_records) records.load_queries(context);
      if (kVectorized) begin(find(block_at(key), id));
#pragma unroll 1
      do {
        const int32_t later_id = request(block_at(key + 2 * S::kTileKv));
        if constexpr (kVectorized) {
          next_ = find(block_at(key + S::kTileKv), next_id);
        } else {
          begin(find(block_at(key), id));
          id = next_id;
        }
        next_id = later_id;
        fill_slot(number++);
        key += S::kTileKv;
      } while (key < end);
    };
    Base::for_each_tile(begin_tile, fill_blocks);
  }

 private:
  using Base::lane_;
  using Base::p_;
  using Base::smem_;

  static constexpr int kRows = S::kTileKv / S::kWideningWarps;
  static_assert(kRows == 16 && S::kHeadDimVo == Widening::kContentDims);
  // An item is 64 dims of 8 rows.
  static constexpr int kItemsOfHalf = S::kHalfDims / 64 * 2;
  static constexpr bool kHasTail = S::kTailDims > 0;
  static constexpr bool kTailHas8Bits = kHasTail && Widening::kTailBytes == 1;
  static constexpr int kItems = 2 * kItemsOfHalf + (kTailHas8Bits ? 2 : 0);
  // Two groups have as many items as there are registers for.
  static constexpr int kAhead = kItems / 2;
  static constexpr int kFirstGroup = (kAhead + 1) / 2;
  static_assert(kItems % kAhead == 0);

  /// The rows of a block that the warp has.
  struct Rows {
    const unsigned char* own;  // lane i < 16: row i; lane 16 + i: the tail of row i
    uint32_t existing;         // bit i: whether row i exists; others become zeros
  };
  /// Where the first items of this lane's two rows are, and whether the rows exist.
  struct Source {
    const unsigned char* content[2];
    bool exists[2];
  };

  // These are computed where they are used: kept, they would take registers that others need.
  FLASHPLAN_DEVICE int lane() const { return opaque(lane_); }
  FLASHPLAN_DEVICE int own_row() const { return first_row_ + lane() % kRows; }
  /// The first of the two rows that this lane loads, behind first_row_; the other one is 8 further.
  FLASHPLAN_DEVICE int loaded_row() const { return lane() / 4; }
  /// Which 16 bytes of each 64 this lane loads.
  FLASHPLAN_DEVICE int chunk() const { return lane() % 4; }
  FLASHPLAN_DEVICE bool has_own_tail() const { return kTailHas8Bits && p_.tails.k.num_dims > 0; }

  FLASHPLAN_DEVICE int32_t request(const Block& block) const {
    const int row = own_row();
    return row < block.count ? places_.request(block.kv_row, block.key + row) : 0;
  }
  /// Finds the rows of a block, and brings them to the L2 cache. Zeros replace rows past the last
  /// key, rows of keys that no query sees, and rows of keys that are not in the cache: what lies
  /// there may be NaN, and 0 * NaN is NaN. Their address is that of a query, which can be loaded.
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
    const auto* none = static_cast<const unsigned char*>(p_.tensors.q.data);
    const unsigned char* address = lane() < kRows ? content : tail;
    return {exists ? address : none, __ballot_sync(0xffffffffU, exists) & 0xffffU};
  }
  /// Brings a row to the L2 cache. Two lanes have looked it up; each brings every other 64 bytes.
  FLASHPLAN_DEVICE void prefetch(const unsigned char* content, const unsigned char* tail) const {
    constexpr int kBytes = Widening::kTailOffset + S::kTailDims * Widening::kTailBytes;
    const int last = (has_own_tail() ? Widening::kContentDims : kBytes) - 1;
    const int upper = lane() / kRows;
#pragma unroll
    for (int byte = 0; byte < kBytes; byte += 128) {
      prefetch_l2(content + min(byte + upper * 64, last));
    }
    if (has_own_tail()) prefetch_l2(tail + upper * (S::kTailDims - 1));
  }
  FLASHPLAN_DEVICE Source source(const Rows& rows) const {
    Source source;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      source.content[i] = shuffled_pointer(rows.own, loaded_row() + 8 * i) + chunk() * 16;
      source.exists[i] = (rows.existing >> (loaded_row() + 8 * i) & 1) != 0;
    }
    return source;
  }

  /// Takes the rows of a block without a predecessor.
  FLASHPLAN_DEVICE void begin(const Rows& rows) {
    rows_ = rows;
    source_ = source(rows);
    load_scales(rows, 0);
    load_scales(rows, 1);
    if constexpr (kVectorized) {
      load_group(source_, rows, 0);
      load_group(source_, rows, 1);
    }
  }

  FLASHPLAN_DEVICE void fill_slot(uint32_t number) {
    mbarrier_wait(smem_.emptied(number, 0), smem_.emptied(number, 1));
    if (places_.are_listed() && lane() < kRows / 8) {
      smem_.memory.found[number % S::kSlots][first_row_ / 8 + lane()] =
          static_cast<uint8_t>(rows_.existing >> 8 * lane());
    }
    if constexpr (kVectorized) {
      const Source next = source(next_);
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        store_group(group, number);
        __syncwarp();  // the compiler would move the loads
        if (group < 2) {
          load_group(source_, rows_, group + 2);
        } else {
          load_group(next, next_, group - 2);
          load_scales(next_, group - 2);
        }
        __syncwarp();
      }
      source_ = next;
      rows_ = next_;
    } else {
#pragma unroll 1
      for (int item = 0; item < kItems; ++item) {
        store(item, number, load(source_, rows_, item));
        if (item == kItemsOfHalf - 1) end_left(number);
      }
    }
    finish_tail(number);
    announce(number, 1);
  }
  FLASHPLAN_DEVICE void end_left(uint32_t number) const {
    announce(number, 0);
    copy_tail(number);
  }
  FLASHPLAN_DEVICE void announce(uint32_t number, int part) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(smem_.full(number, part).barrier);
  }

  // A tail of 16 bits is copied as it is. It arrives while the right half is widened.
  static constexpr int kTailCopies = kHasTail && !kTailHas8Bits ? kRows / 4 : 0;
  /// The row and the 16 bytes of copy number `i` of this lane.
  FLASHPLAN_DEVICE uint32_t tail_place(uint32_t number, int i) const {
    return smem_.tail(number) + S::Tail::offset(first_row_ + i * 4 + lane() / 8, lane() % 8);
  }
  FLASHPLAN_DEVICE void copy_tail(uint32_t number) const {
#pragma unroll
    for (int i = 0; i < kTailCopies; ++i) {
      const int row = i * 4 + lane() / 8;
      const unsigned char* from = shuffled_pointer(rows_.own, kRows + row) + lane() % 8 * 16;
      const bool exists = (rows_.existing >> row & 1) != 0;
      if constexpr (kVectorized) {
        cp_async_16_padded(tail_place(number, i), from, exists ? 16 : 0);
      } else {
        store_shared_16(tail_place(number, i), load_unaligned_16(from, exists ? 16 : 0));
      }
    }
  }
  FLASHPLAN_DEVICE void finish_tail(uint32_t number) const {
    if constexpr (kTailCopies > 0 && kVectorized) cp_async_wait_all();
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

  /// Loads the scales of a half, two for each row: lane i loads that of row i % 16, dims from
  /// 128 * (i / 16) on.
  FLASHPLAN_DEVICE void load_scales(const Rows& rows, int part) {
    if constexpr (Widening::kHasScales) {
      const unsigned char* from = shuffled_pointer(rows.own, lane() % kRows) +
                                  Widening::kContentDims + (part * 2 + lane() / kRows) * 4;
      if constexpr (kVectorized) {
        scales_[part] = __uint_as_float(load_global_4(from));
      } else {
        const bool exists = (rows.existing >> lane() % kRows & 1) != 0;
        scales_[part] = __uint_as_float(load_unaligned_16(from, exists ? 4 : 0).x);
      }
    }
  }

  static FLASHPLAN_DEVICE uint4 load_unaligned_16(const unsigned char* from, int num_bytes) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < num_bytes) words[i / 4] |= uint32_t{from[i]} << i % 4 * 8;
    }
    return {words[0], words[1], words[2], words[3]};
  }

  static FLASHPLAN_DEVICE bool is_tail(int item) { return item >= 2 * kItemsOfHalf; }
  FLASHPLAN_DEVICE uint4 load(const Source& source, const Rows& rows, int item) const {
    const int half = item % 2;  // of the warp's rows
    const unsigned char* from = source.content[half] + item / 2 * 64;
    if (is_tail(item)) {
      from = shuffled_pointer(rows.own, kRows + loaded_row() + 8 * half) + chunk() * 16;
    }
    if constexpr (kVectorized) return load_once_16(from);
    return load_unaligned_16(from, source.exists[half] ? 16 : 0);
  }

  /// The first item of a group; the others follow.
  static FLASHPLAN_DEVICE int first_item(int group) {
    return group / 2 * kAhead + group % 2 * kFirstGroup;
  }
  FLASHPLAN_DEVICE void load_group(const Source& source, const Rows& rows, int group) {
#pragma unroll
    for (int item = first_item(group); item < first_item(group + 1); ++item) {
      ahead_[item % kAhead] = load(source, rows, item);
    }
  }
  FLASHPLAN_DEVICE void store_group(int group, uint32_t number) const {
#pragma unroll
    for (int item = first_item(group); item < first_item(group + 1); ++item) {
      store(item, number, ahead_[item % kAhead]);
      if (item == kItemsOfHalf - 1) end_left(number);
    }
  }

  /// Widens an item, and stores it.
  FLASHPLAN_DEVICE void store(int item, uint32_t number, uint4 bytes) const {
    const int half = item % 2;
    float scale = 1.0F;
    if constexpr (Widening::kHasScales) {
      scale = __shfl_sync(0xffffffffU, scales_[item / kItemsOfHalf],
                          item % kItemsOfHalf / 4 * kRows + loaded_row() + 8 * half);
    }
    // Shuffles come first, so that all lanes take part.
    if (!source_.exists[half]) {
      bytes = {0, 0, 0, 0};
      scale = 0.0F;
    }
    const int group = first_row_ + 8 * half;
    if (is_tail(item)) {
      store_widened(smem_.tail(number) + S::Tail::offset(group, 0) + place_, bytes, 1.0F);
      return;
    }
    store_widened(smem_.half(number, item / kItemsOfHalf) +
                      S::Half::offset(group, item % kItemsOfHalf / 2 * 8) + place_,
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
  const int first_row_;   // the warp's first row of a block
  const uint32_t place_;  // of this lane's first item, in 8 rows of a tail or of 64 dims
  Rows rows_ = {};        // of the block that is stored
  Source source_ = {};    // in these
  Rows next_ = {};        // of the next block of the tile
  uint4 ahead_[kVectorized ? kAhead : 1] = {};
  float scales_[2] = {};  // of this lane's row, left and right
};

}  // namespace flashplan::device
