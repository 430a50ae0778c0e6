// SPDX-License-Identifier: Apache-2.0
// How the sm90 family prepares keys and values (abi/prepared_kv.h): some warps write them to the
// workspace, and another warp copies them from there to shared memory when they are ready.
#pragma once

#include "kernels/device/rotation.h"
#include "kernels/device/sm90_producer_warp.h"

namespace flashplan::device {

/// What the warps that prepare tiles share with those that read them.
template <typename S>
struct Sm90Prepared {
  static constexpr int kPartRows = 32;
  static constexpr int kPartsOfKeys = S::kTileKv / kPartRows;
  /// Parts of a tile of one kv head, those of the keys first. Each is prepared by one warp.
  static constexpr int kParts = S::kTakesPreparedValues ? 2 * kPartsOfKeys : kPartsOfKeys;

  static FLASHPLAN_DEVICE PreparedState* state(const AttentionParams& p, int32_t tile,
                                               int32_t head) {
    return p.prepared.states + int64_t{tile} * p.prepared.num_kv_heads + head;
  }
  /// A warp of those that prepare or read tiles calls it when it needs no states any more. The last
  /// one of all CTAs sets the states to zero for the next run.
  static FLASHPLAN_DEVICE void leave(const AttentionParams& p) {
    const int32_t num_states = *p.prepared.num_tiles * p.prepared.num_kv_heads;
    if (num_states == 0) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int32_t before = 0;
    __syncwarp();
    if (lane == 0) before = arrive(p.prepared.num_left);
    before = __shfl_sync(0xffffffffU, before, 0);
    if (before + 1 != S::kPreparedWarps * static_cast<int32_t>(gridDim.x)) return;
#pragma unroll 1
    for (int32_t i = lane; i < num_states; i += 32) p.prepared.states[i] = {};
    if (lane == 0) *p.prepared.num_left = 0;
  }
};

/// The prepared tiles that a work tile reads. One that has no keys, because its request is shorter
/// than planned, reads a tile of zeros.
template <typename S>
struct Sm90PreparedRange {
  int32_t begin;  // numbers in the segment
  int32_t end;

  FLASHPLAN_DEVICE explicit Sm90PreparedRange(const WorkTile& tile)
      : begin(tile.kv_begin / S::kTileKv),
        end(max((tile.kv_end + S::kTileKv - 1) / S::kTileKv, begin + 1)) {}
};

/// Prepares the tiles of segments, together with the warps of other CTAs that have work tiles of
/// the same segments: a warp claims the next part of a tile that no other has claimed.
template <typename S>
class Sm90Preparer : Sm90ProducerWarp<S> {
  using Base = Sm90ProducerWarp<S>;
  using Prepared = Sm90Prepared<S>;

 public:
  /// `warp`: its number among the `num_warps` of the CTA that prepare.
  FLASHPLAN_DEVICE Sm90Preparer(const AttentionParams& p, unsigned char* smem, int warp,
                                int num_warps)
      : Base(p, smem, warp), num_warps_(num_warps) {}

  /// Prepares for all work tiles of the queue, ahead of the warps that read them.
  FLASHPLAN_DEVICE void run() const {
    for (int32_t i = 0; prepare(i); ++i) release_context(i);
  }
  /// Prepares for work tile number `i` of the queue. False: there is none.
  FLASHPLAN_DEVICE bool prepare(int32_t i) const {
    const Sm90Context& context = wait_context(i);
    if (context.is_end) return false;
    if (context.has_steps()) prepare(context, first_prepared(i));
    return true;
  }

  using Base::release_context;
  using Base::wait_context;

 private:
  using Base::first_prepared;
  using Base::lane_;
  using Base::p_;
  using Base::warp_;

  /// Returns when each part of the work tile's keys is prepared, or some warp is about to do it.
  /// `first_tile`: that of its segment.
  FLASHPLAN_DEVICE void prepare(const Sm90Context& context, int32_t first_tile) const {
    const Sm90PreparedRange<S> range(context.tile);
    const int32_t heads_end = context.tile.kv_head + context.tile.num_kv_heads;
    // CTAs whose work tiles read the same keys begin with different ones.
    const auto place = static_cast<uint32_t>(context.tile.row_tile * num_warps_ + warp_) /
                       static_cast<uint32_t>(Prepared::kParts);
#pragma unroll 1
    for (int32_t head = context.tile.kv_head; head < heads_end; ++head) {
#pragma unroll 1
      for (int32_t first = range.begin; first < range.end; first += 32) {
        const int32_t count = min(range.end - first, 32);
        auto i = static_cast<int32_t>(place % static_cast<uint32_t>(count));
        do {
          while (claim_and_prepare(context.segment, first_tile, first + i, head)) {
          }
          i = free_tile(first_tile + first, count, i, head);
        } while (i >= 0);
      }
    }
  }

  /// The number of a tile of which parts are free, among `count` from `first` on; from number
  /// `from` on if there is one. -1: there is none.
  FLASHPLAN_DEVICE int32_t free_tile(int32_t first, int32_t count, int32_t from,
                                     int32_t head) const {
    const PreparedState* const own = Prepared::state(p_, first + lane_, head);
    const bool is_free = lane_ < count && load_relaxed(&own->claimed) < Prepared::kParts;
    const uint32_t free_tiles = __ballot_sync(0xffffffffU, is_free);
    const uint32_t behind = free_tiles >> from << from;
    return __ffs(static_cast<int>(behind != 0 ? behind : free_tiles)) - 1;
  }
  /// Claims and prepares a part of a tile, step number `step` of its segment. Returns whether there
  /// was a free one.
  FLASHPLAN_DEVICE bool claim_and_prepare(const Segment& segment, int32_t first_tile, int32_t step,
                                          int32_t head) const {
    PreparedState* const state = Prepared::state(p_, first_tile + step, head);
    int32_t part = 0;
    if (lane_ == 0) part = atomicAdd(&state->claimed, 1);
    part = __shfl_sync(0xffffffffU, part, 0);
    if (part >= Prepared::kParts) return false;
    const bool is_key = part < Prepared::kPartsOfKeys;
    prepare_part(segment, first_tile, step, head, is_key,
                 part % Prepared::kPartsOfKeys * Prepared::kPartRows);
    // Other CTAs read it by bulk copies.
    fence_async_proxy_of_all_memory();
    __syncwarp();
    if (lane_ == 0) add_release(is_key ? &state->keys : &state->values, 1);
    return true;
  }
  FLASHPLAN_DEVICE void prepare_part(const Segment& segment, int32_t first_tile, int32_t step,
                                     int32_t head, bool is_key, int first_row) const {
    const KvView& view = is_key ? p_.tensors.k : p_.tensors.v;
    const int32_t first_key = step * S::kTileKv + first_row;
    const int32_t num_keys = segment.position + segment.qo_len;
    const int bytes = is_key ? S::kKeyBytes : S::kValueBytes;
    unsigned char* const tile =
        (is_key ? p_.prepared.keys : p_.prepared.values) +
        (int64_t{first_tile + step} * p_.prepared.num_kv_heads + head) * bytes;
    const int32_t key = max(min(first_key + lane_, num_keys - 1), 0);
    const unsigned char* row = nullptr;
    if (first_key < num_keys) {
      row = row_of(view, segment.kv_row, key, head);
      // All rows are requested before the first one is waited for.
#pragma unroll
      for (int line = 0; line < S::Key::kBlocks; ++line) prefetch_l2(row + line * 128);
    }
    if constexpr (S::kRotates) {
      copy_rotated_rows(tile, first_row, row, num_keys - first_key, first_key);
    } else {
      copy_rows(tile, first_row, row, num_keys - first_key);
    }
  }

  FLASHPLAN_DEVICE const unsigned char* row_of(const KvView& view, int32_t kv_row, int32_t key,
                                               int32_t head) const {
    const PageTable& pages = p_.tensors.pages;
    int64_t page = 0;
    int64_t in_page = int64_t{kv_row} + key;
    if (pages.ids != nullptr) {
      const auto number =
          static_cast<int32_t>(quotient(static_cast<uint32_t>(key), pages.page_size));
      page = max(min(page_ids(pages, kv_row)[number], p_.prepared.num_pages - 1), 0);
      in_page = key - number * pages.page_size.value;
    }
    return static_cast<const unsigned char*>(view.data) +
           2 * (page * view.page_stride + in_page * view.token_stride + head * view.head_stride);
  }

  /// Chunk `chunk` of 8 dims of a row.
  FLASHPLAN_DEVICE uint4 load_chunk(const unsigned char* row, int chunk) const {
    if (p_.tensors.vectorized) return __ldcs(reinterpret_cast<const uint4*>(row) + chunk);
    const auto* const from = reinterpret_cast<const uint16_t*>(row) + chunk * 8;
    const auto pair = [from](int i) { return from[2 * i] | uint32_t{from[2 * i + 1]} << 16; };
    return {pair(0), pair(1), pair(2), pair(3)};
  }
  /// Copies 32 rows to rows [first_row, first_row + 32) of a tile; lane r has the address of the
  /// r-th one. Rows from `num_valid` on become zeros, and so do dims past the last one.
  FLASHPLAN_DEVICE void copy_rows(unsigned char* tile, int first_row, const unsigned char* row,
                                  int num_valid) const {
    static_assert(S::kHeadDimQk == S::kHeadDimVo);
    constexpr int kLanesPerRow = S::Key::kBlocks * 8;
    constexpr int kRowsAtOnce = 32 / kLanesPerRow;
    constexpr int kLoadsAtOnce = 4;
    const int chunk = lane_ % kLanesPerRow;
    const int valid = chunk * 8 < p_.tensors.head_dim_qk ? num_valid : 0;
#pragma unroll 1
    for (int first = lane_ / kLanesPerRow; first < 32; first += kLoadsAtOnce * kRowsAtOnce) {
      uint4 words[kLoadsAtOnce];
#pragma unroll
      for (int i = 0; i < kLoadsAtOnce; ++i) {
        const int r = first + i * kRowsAtOnce;
        const unsigned char* const from = shuffled_pointer(row, r);
        words[i] = r < valid ? load_chunk(from, chunk) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kLoadsAtOnce; ++i) {
        const int r = first_row + first + i * kRowsAtOnce;
        *reinterpret_cast<uint4*>(tile + S::Key::offset(r, chunk)) = words[i];
      }
    }
  }

  /// The same for keys, rotated. `first_key`: the position of the first row.
  FLASHPLAN_DEVICE void copy_rotated_rows(unsigned char* tile, int first_row,
                                          const unsigned char* row, int num_valid,
                                          int32_t first_key) const {
    using Variant = typename S::Variant;
    constexpr bool kInterleaved = Variant::kInterleaved;
    constexpr int kPairs = kInterleaved ? 4 : 8;  // of an item: a chunk, or one of each half
    constexpr int kItems = Variant::kRotaryDim / 2 / kPairs;
    const auto store = [&](int r, int chunk, uint4 words) {
      *reinterpret_cast<uint4*>(tile + S::Key::offset(first_row + r, chunk)) = words;
    };
#pragma unroll 2
    for (int i = lane_; i < 32 * kItems; i += 32) {
      const int r = i / kItems;
      const int item = i % kItems;
      const unsigned char* const from = shuffled_pointer(row, r);
      uint4 a = {};
      uint4 b = {};
      if (r < num_valid) {
        a = load_chunk(from, item);
        if (!kInterleaved) b = load_chunk(from, item + kItems);
      }
      const auto cos_sin = [&](int pair) {
        return rotor(angle_of(Variant::turns(item * kPairs + pair), first_key + r), Variant::kGain);
      };
      if constexpr (kInterleaved) {
        rotate_chunk<S::kKv>(a, cos_sin);
      } else {
        rotate_chunks_of_halves<S::kKv>(a, b, cos_sin);
        store(r, item + kItems, b);
      }
      store(r, item, a);
    }
    constexpr int kFirstOther = Variant::kRotaryDim / 8;
    constexpr int kOthers = S::Key::kBlocks * 8 - kFirstOther;
    constexpr int kDivisor = kOthers > 0 ? kOthers : 1;
#pragma unroll 2
    for (int i = lane_; i < 32 * kOthers; i += 32) {
      const int r = i / kDivisor;
      const int chunk = kFirstOther + i % kDivisor;
      const unsigned char* const from = shuffled_pointer(row, r);
      const bool exists = r < num_valid && chunk * 8 < p_.tensors.head_dim_qk;
      store(r, chunk, exists ? load_chunk(from, chunk) : uint4{});
    }
  }

  const int num_warps_;
};

/// Which tiles of a kv head are ready, as a warp knows that copies their keys, or their values, to
/// shared memory.
template <typename S, bool kIsKey>
class Sm90ReadyTiles {
 public:
  /// Waits until a tile is ready. It looks at 32 tiles at once, because a look takes nearly as long
  /// as a step of the consumers.
  FLASHPLAN_DEVICE void wait(const AttentionParams& p, int32_t tile, int32_t head) {
    const auto distance = static_cast<uint32_t>(tile - first_);
    const bool is_known = head == head_ && distance < 32 && (ready_ >> distance & 1) != 0;
    if (is_known) return;
    ready_ = wait_for_first(p, tile, head);
    first_ = tile;
    head_ = head;
  }

 private:
  /// Returns which of 32 tiles are ready, when the first of them is.
  static __device__ __noinline__ uint32_t wait_for_first(const AttentionParams& p, int32_t tile,
                                                         int32_t head) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const PreparedState* state = Sm90Prepared<S>::state(p, tile + lane, head);
    uint32_t ready = 0;
    while ((ready & 1) == 0) {
      const int32_t parts = load_acquire(kIsKey ? &state->keys : &state->values);
      ready = __ballot_sync(0xffffffffU, parts == Sm90Prepared<S>::kPartsOfKeys);
    }
    __syncwarp();
    fence_async_proxy_of_all_memory();
    return ready;
  }

  int32_t first_ = 0;  // of the 32 tiles
  int32_t head_ = -1;
  uint32_t ready_ = 0;
};

/// Copies prepared keys to shared memory, and their values if these are prepared, too.
template <typename S>
class Sm90PreparedLoader : Sm90ProducerWarp<S> {
  using Base = Sm90ProducerWarp<S>;

 public:
  using Base::Base;

  /// Fills slots in the order in which the consumers use them: the keys of a step, then the values
  /// of the step before it. `num_arrivals`: those that a slot's barrier expects.
  FLASHPLAN_DEVICE void run(int num_arrivals) {
    num_arrivals_ = num_arrivals;
    int32_t last_tile = kNotPrepared;  // its keys are requested, its values are not
    int32_t last_head = 0;
    for (int32_t i = 0;; ++i) {
      const Sm90Context& context = wait_context(i);
      if (context.has_steps()) {
        const Sm90PreparedRange<S> range(context.tile);
        const int32_t first_tile = first_prepared(i);
        const int32_t heads_end = context.tile.kv_head + context.tile.num_kv_heads;
        for (int32_t head = context.tile.kv_head; head < heads_end; ++head) {
          for (int32_t step = range.begin; step < range.end; ++step) {
            load(keys_, true, first_tile + step, head);
            if (last_tile != kNotPrepared) load_values(last_tile, last_head);
            last_tile = first_tile + step;
            last_head = head;
          }
        }
      } else if (last_tile != kNotPrepared) {
        // Before a tile without steps, and before the end, the consumers finish the tile before it.
        load_values(last_tile, last_head);
        last_tile = kNotPrepared;
      }
      if (context.is_end) return;
      release_context(i);
    }
  }

 private:
  using Base::barrier;
  using Base::base_;
  using Base::first_prepared;
  using Base::lane_;
  using Base::p_;
  using Base::release_context;
  using Base::wait_context;

  /// Copies one head of a tile to a slot. One thread calls it, for all that `full` expects.
  FLASHPLAN_DEVICE void copy(bool is_key, uint32_t to, uint32_t full, int32_t tile,
                             int32_t head) const {
    const PreparedKv& kv = p_.prepared;
    const unsigned char* tiles = is_key ? kv.keys : kv.values;
    const int bytes = is_key ? S::kKeyBytes : S::kValueBytes;
    mbarrier_arrive_expect(full, bytes, num_arrivals_);
    bulk_load(to, tiles + (int64_t{tile} * kv.num_kv_heads + head) * bytes, bytes, full);
  }
  FLASHPLAN_DEVICE void load_values(int32_t tile, int32_t head) {
    if constexpr (S::kTakesPreparedValues) {
      load(values_, false, tile, head);
    } else {
      advance();  // another warp loads them
    }
  }
  FLASHPLAN_DEVICE void advance() {
    parity_ ^= static_cast<uint32_t>((slot_ + 1) / S::kSlots);
    slot_ = (slot_ + 1) % S::kSlots;
  }
  template <typename ReadyTiles>
  FLASHPLAN_DEVICE void load(ReadyTiles& ready, bool is_key, int32_t tile, int32_t head) {
    ready.wait(p_, tile, head);
    mbarrier_wait(barrier(S::kSlotEmpty, slot_), parity_);
    if (lane_ == 0) {
      copy(is_key, base_ + S::kFirstSlot + slot_ * S::kSlotBytes, barrier(S::kSlotFull, slot_),
           tile, head);
    }
    advance();
  }

  Sm90ReadyTiles<S, true> keys_;
  Sm90ReadyTiles<S, false> values_;
  int num_arrivals_ = 0;
  int slot_ = 0;         // the next one
  uint32_t parity_ = 1;  // of the phase in which it was freed
};

}  // namespace flashplan::device
