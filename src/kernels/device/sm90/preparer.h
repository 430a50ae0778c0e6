// SPDX-License-Identifier: Apache-2.0
// The warps of the sm90 family that prepare keys and values (abi/prepared_kv.h): they gather the
// rows in shared memory, widen them if they have 8 bits, rotate keys if the plan has a rotation,
// and store the rows in the workspace. From there Sm90PreparedLoader copies them to the slots that
// the consumers read.
#pragma once

#include "kernels/device/sm90/prepared.h"
#include "kernels/device/sm90/producer_warp.h"
#include "kernels/device/sm90/rotation_series.h"
#include "kernels/device/sm90/widening.h"

namespace flashplan::device {

/// One of the warps that prepare. The keys of a segment are divided into tiles of kTileKv keys, and
/// these into parts of kPartRows keys. All CTAs that have work tiles of the segment prepare parts:
/// a counter for each kv head says how many parts are claimed, in the order of the keys. A warp
/// claims the next part until all parts that its work tile reads are claimed.
template <typename S>
class Sm90Preparer : Sm90ProducerWarp<S> {
  using Base = Sm90ProducerWarp<S>;
  using Prepared = Sm90Prepared<S>;

 public:
  using Base::Base;

  /// Prepares the keys and values of all work tiles of the queue, before the warps that copy them
  /// to the slots need them.
  FLASHPLAN_DEVICE void run() { prepare_before(INT32_MAX); }

  /// Prepares the keys and values of the first `end` work tiles of the queue, which may have fewer.
  /// Returns when each of their parts is prepared or claimed by another warp.
  FLASHPLAN_DEVICE void prepare_before(int32_t end) {
    int32_t stored = kNoPart;      // the part that is on its way to the workspace
    bool stored_key = true;        // whether the keys of `stored` are on their way, or its values
    bool stored_on_pages = false;  // whether all page ids of `stored` are inside of the cache
#pragma unroll 1
    for (;;) {
      Part part;
      // Other warps wait for the stored part, so it is announced before this warp waits for the
      // number of its next part.
      if (!find_part(end, stored == kNoPart, part)) {
        if (stored == kNoPart) return;
        announce(stored, stored_key, stored_on_pages);
        stored = kNoPart;
        continue;
      }
#pragma unroll 1
      for (int kind = 0; kind < (S::kTakesPreparedValues ? 2 : 1); ++kind) {
        const bool is_key = kind == 0;
        request(part, is_key);
        if (stored != kNoPart) announce(stored, stored_key, stored_on_pages);
        store(part, is_key);
        stored = part.number;
        stored_key = is_key;
        stored_on_pages = __all_sync(0xffffffffU, has_page(p_.tensors.pages, part.page)) != 0;
      }
    }
  }

  /// Prepares the keys and values of work tile `i` and of those after it, up to one whose keys are
  /// not prepared, or that has no steps. Returns the number of that tile, and writes to `num_steps`
  /// how many steps the work tiles from `i` to the one before it have.
  FLASHPLAN_DEVICE int32_t prepare_from(int32_t i, uint32_t& num_steps) {
    i_ = i;
    num_steps_ = 0;
    prepare_before(INT32_MAX);
    __syncwarp();  // lane 0 has waited until the last bulk store has read its rows
    num_steps = num_steps_;
    return i_;
  }

  using Base::release_context;
  using Base::wait_context;

 private:
  using Base::copy_rows;
  using Base::first_prepared;
  using Base::has_context;
  using Base::is_prepared;
  using Base::lane_;
  using Base::p_;
  using Base::row_address;
  using Base::smem_;
  using Base::warp_;

  static constexpr int32_t kNoHead = -1;
  static constexpr int32_t kNoPart = -1;

  /// A part of a tile. Lane r looks up its row r % S::kPartRows.
  struct Part {
    int32_t number = 0;  // number among the parts of all tiles and kv heads
    int32_t first_key = 0;
    int32_t num_valid = 0;  // rows that are keys of the segment; the others become zeros
    int32_t head = 0;
    int32_t page = 0;  // page id of this lane's row, if there are pages
    int32_t row = 0;   // this lane's row in its page
  };

  /// Finds the next part to prepare, and requests the page ids of its rows. Returns false if there
  /// is none, or if `waits` is false and finding one would mean waiting: for another claim, or for
  /// a record that has not arrived.
  FLASHPLAN_DEVICE bool find_part(int32_t end, bool waits, Part& part) {
#pragma unroll 1
    while (head_ != kNoHead || begin_tile(end, waits)) {
      const Sm90Context& context = wait_context(i_);
      const int32_t claimed = __shfl_sync(0xffffffffU, claimed_, 0);
      const int32_t num_keys = min(context.segment.position + context.segment.qo_len,
                                   p_.tensors.pages.keys_of(context.segment.kv_row));
      const int32_t num_tiles = max((num_keys + S::kTileKv - 1) / S::kTileKv, 1);
      const bool exists = claimed < num_tiles * Prepared::kParts;
      if (exists) part = requested_part(context.segment, num_keys, claimed);
      if (claimed + 1 < Sm90PreparedRange<S>(context.tile).end * Prepared::kParts) {
        claim();
      } else if (++head_ < context.tile.kv_head + context.tile.num_kv_heads) {
        claim();
      } else {
        head_ = kNoHead;
        finish_tile();
        begin_tile(end, false);
      }
      if (exists || !waits) return exists;
    }
    return false;
  }
  /// Claims a part of the next work tile that has steps. Returns false if there is none to prepare,
  /// or if `waits` is false and a record has not arrived.
  FLASHPLAN_DEVICE bool begin_tile(int32_t end, bool waits) {
#pragma unroll 1
    while (i_ < end && (waits || has_context(i_))) {
      const Sm90Context& context = wait_context(i_);
      if (context.is_end) return false;
      if (S::kWidens && !(context.has_steps() && is_prepared(i_))) return false;
      if (context.has_steps()) {
        head_ = context.tile.kv_head;
        claim();
        return true;
      }
      finish_tile();
    }
    return false;
  }
  FLASHPLAN_DEVICE void finish_tile() {
    if constexpr (S::kWidens) {
      const Sm90Context& context = wait_context(i_);
      num_steps_ += context.tile.num_kv_heads * context.num_steps(S::kTileKv);
    }
    // Where keys are rotated, the rotator releases the context, which it needs for queries.
    if constexpr (!S::kRotates) release_context(i_);
    ++i_;
  }
  /// Claims the next part of kv head head_ of work tile i_: requests the part's number, which
  /// arrives in lane 0.
  FLASHPLAN_DEVICE void claim() {
    if (lane_ == 0) {
      claimed_ = atomicAdd(&Prepared::state(p_, first_prepared(i_), head_)->claimed, 1);
    }
  }

  /// Part number `number` of kv head head_, with the page ids of its rows requested.
  FLASHPLAN_DEVICE Part requested_part(const Segment& segment, int32_t num_keys,
                                       int32_t number) const {
    const PageTable& pages = p_.tensors.pages;
    const int32_t tile = first_prepared(i_) + number / Prepared::kParts;
    Part part;
    part.number =
        (tile * p_.prepared.num_kv_heads + head_) * Prepared::kParts + number % Prepared::kParts;
    part.first_key = number * S::kPartRows;
    part.num_valid = num_keys - part.first_key;
    part.head = head_;
    if (part.num_valid <= 0) return part;
    const int32_t key = min(part.first_key + lane_ % S::kPartRows, num_keys - 1);
    part.row = segment.kv_row + key;
    if (pages.ids != nullptr) {
      const auto page = static_cast<int32_t>(quotient(static_cast<uint32_t>(key), pages.page_size));
      part.row = key - page * pages.page_size.value;
      part.page = static_cast<int32_t>(load_global_4(page_ids(pages, segment.kv_row) + page));
    }
    return part;
  }
  /// Starts to copy the keys or values of a part to shared memory. The rows overwrite those of the
  /// part before, so this first waits until the bulk store of that part has read them.
  FLASHPLAN_DEVICE void request(const Part& part, bool is_key) const {
    const KvView& view = is_key ? p_.tensors.k : p_.tensors.v;
    const int head_dim = is_key ? p_.tensors.head_dim_qk : p_.tensors.head_dim_vo;
    const unsigned char* const row = row_address(view, part.page, part.row, part.head);
    if (lane_ == 0) tma_store_wait_read();
    __syncwarp();
    if constexpr (S::kWidens) {
      Sm90Widening<S>::request(p_, raw_rows(), row, 0, part.num_valid, head_dim);
      return;
    }
    if (!p_.tensors.vectorized) {
      copy_rows(stage(), S::Key::kGroupBytes, S::Key::kBlockBytes, row, S::kPartRows,
                part.num_valid, S::Key::kBlocks, 2 * head_dim);
      return;
    }
    // Does what copy_rows() does, with unrolled loops. The lane is computed anew, so that no
    // registers are held by offsets that follow from it.
    const int lane = opaque(lane_);
    const int chunk = lane % 8;
#pragma unroll
    for (int first = 0; first < S::kPartRows; first += 4) {
      const int r = first + lane / 8;
      const unsigned char* const from = shuffled_pointer(row, r) + chunk * 16;
#pragma unroll
      for (int block = 0; block < S::Key::kBlocks; ++block) {
        const bool exists = r < part.num_valid && block * 64 + chunk * 8 < head_dim;
        cp_async_16_padded(stage() + S::Key::offset(r, block * 8 + chunk), from + block * 128,
                           exists ? 16 : 0);
      }
    }
  }
  /// Waits for the requested rows, rotates keys, and starts to store the rows in the workspace.
  FLASHPLAN_DEVICE void store(const Part& part, bool is_key) const {
    if constexpr (S::kRotates) {
      rotate(part.first_key);
    } else {
      wait_rows();
    }
    if constexpr (S::kWidens) Sm90Widening<S>::widen(is_key, raw_rows(), stage());
    fence_async_proxy();
    __syncwarp();
    if (lane_ != 0) return;
    unsigned char* const parts = is_key ? p_.prepared.keys : p_.prepared.values;
    bulk_store(parts + int64_t{part.number} * S::kPartBytes, stage(), S::kPartBytes);
    tma_store_commit();
  }
  /// Waits until a part is stored in the workspace, then counts it as ready for the warps that wait
  /// for its tile.
  FLASHPLAN_DEVICE void announce(int32_t part, bool is_key, bool on_pages) const {
    if (lane_ != 0) return;
    bulk_store_wait();
    PreparedState& state = p_.prepared.states[part / Prepared::kParts];
    add_release(is_key ? &state.keys : &state.values, on_pages ? 1 : 1 + kPartOffPages);
  }

  FLASHPLAN_DEVICE void wait_rows() const {
    cp_async_wait_all();
    __syncwarp();
  }

  /// Where this warp gathers the rows of a part.
  FLASHPLAN_DEVICE uint32_t stage() const { return smem_.part(warp_); }
  /// Where rows of 8 bits are gathered: in the second half, so that they are widened in place.
  FLASHPLAN_DEVICE uint32_t raw_rows() const { return stage() + S::kPartBytes / 2; }

  /// Waits for the requested rows and rotates them. `first_key`: the position of the first one.
  FLASHPLAN_DEVICE void rotate(int32_t first_key) const {
    using Variant = typename S::Variant;
    if constexpr (Variant::kRotaryDim % 8 == 0) {
      rotate_by_fours(first_key);
    } else {
      wait_rows();
      RowRotation<Variant, S::kKv, typename S::Key, S::kHeadDimQk, 32, false>::rotate_rows(
          stage(), 0, S::kPartRows, lane_, [=](int row) { return first_key + row; },
          [](float x, int, int) { return x; });
    }
  }
  /// Does what rotate() does. A lane rotates the same four pairs of dims in some rows of each group
  /// of 8.
  FLASHPLAN_DEVICE void rotate_by_fours(int32_t first_key) const {
    using Variant = typename S::Variant;
    using Pairs = FourPairs<Variant, S::kKv, typename S::Key>;
    constexpr int kMostRows = 32 / Pairs::kPerRow;
    constexpr int kRowStep = kMostRows < 2 ? 1 : kMostRows < 4 ? 2 : kMostRows < 8 ? 4 : 8;
    constexpr int kOwnRows = 8 / kRowStep;
    const int item = opaque(lane_) % Pairs::kPerRow;
    const int first_row = opaque(lane_) / Pairs::kPerRow;
    FourTurns<Variant> turns;
    turns.begin(item, first_key + first_row,
                [](int pair) { return rotor(angle_of(Variant::turns(pair), kRowStep), 1.0F); });
    wait_rows();
    if (first_row >= kRowStep) return;
    Pairs pairs[kOwnRows];
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) pairs[i] = Pairs(first_row + i * kRowStep, item);
#pragma unroll 1
    for (uint32_t group = 0; group < S::kPartBytes; group += S::Key::kGroupBytes) {
      uint4 words[kOwnRows];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) words[i] = pairs[i].load(stage() + group);
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        pairs[i].store(stage() + group, Pairs::rotated(words[i], turns.now));
        turns.advance();
      }
    }
  }

  int32_t i_ = 0;  // number of the work tile in the queue
  int32_t head_ = kNoHead;
  uint32_t num_steps_ = 0;  // steps of the work tiles since prepare_from() began
  int32_t claimed_ = 0;     // in lane 0: the number of the part that the warp has claimed
};

}  // namespace flashplan::device
