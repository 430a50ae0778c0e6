// SPDX-License-Identifier: Apache-2.0
// Warps of the sm90_gather family that copy keys and values row by row, by cp.async, where pages
// are too small for boxes of tensor maps.
#pragma once

#include "kernels/device/sm90/producer_warp.h"

namespace flashplan::device {

/// Each of the warps copies some rows of every slot, and each of its threads arrives at the slot's
/// barrier when its copies are complete. No warp waits for its copies, so all free slots are filled
/// at the same time. cp.async writes shared memory through the generic proxy, and wgmma reads it
/// through the async proxy, so consumers put a fence between their wait for a slot and their
/// products.
template <typename S>
class Sm90Gatherer : Sm90ProducerWarp<S> {
  using Base = Sm90ProducerWarp<S>;

 public:
  /// `warp`: this warp's number among the warps that gather.
  FLASHPLAN_DEVICE Sm90Gatherer(const AttentionParams& p, const Sm90Smem<S>& smem, int warp)
      : Base(p, smem, warp) {}

  /// Fills slots in the order in which the consumers use them: the keys of a step, then the values
  /// of the step before it. Page ids are requested one step ahead, since on a busy GPU they take as
  /// long to arrive as the keys.
  FLASHPLAN_DEVICE void run() {
    Step last = kNoStep;   // the step whose keys are requested, but not yet its values
    Step ahead = kNoStep;  // the step whose page ids are requested, but not yet its keys
    for (int32_t i = 0;; ++i) {
      const Sm90Context& context = wait_context(i);
      const bool has_steps = context.has_steps();
      int32_t begin = 0;
      int32_t end = 0;
      int32_t head = 0;
      // Before a tile without keys, and before the end of the queue, the consumers finish the last
      // tile with keys, so they wait for its last values. Two more rounds of the loop, which
      // request no step, fill the slot of these values.
      int32_t heads_end = 2;
      const int32_t* ids = nullptr;
      if (has_steps) {
        begin = context.tile.kv_begin;
        end = context.tile.kv_end;
        head = context.tile.kv_head;
        heads_end = head + context.tile.num_kv_heads;
        ids = page_ids(p_.tensors.pages, context.segment.kv_row);
      }
      int32_t key = begin;
      do {
        const Step step = has_steps ? requested(context, ids, head, key, end) : kNoStep;
        fill<true>(ahead);
        fill<false>(last);
        last = ahead;
        ahead = step;
        key += S::kTileKv;
        if (key >= end) {
          key = begin;
          ++head;
        }
      } while (head < heads_end);
      if (context.is_end) return;
      release_context(i);
    }
  }

 private:
  using Base::lane_;
  using Base::p_;
  using Base::place_in_page;
  using Base::release_context;
  using Base::report_pages;
  using Base::request_page;
  using Base::row_address;
  using Base::smem_;
  using Base::wait_context;
  using Base::warp_;

  static constexpr int kLanesPerRow = S::Key::kBlocks * 8;  // lanes that copy a row, 16 bytes each
  static_assert(32 % kLanesPerRow == 0 && S::kHeadDimQk == S::kHeadDimVo);
  static constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  // The warps take groups of 8 rows in turn. The last warps may have one group less.
  static constexpr int kGroups = S::kTileKv / 8;
  static constexpr int kOwnGroups = (kGroups + S::kGatherWarps - 1) / S::kGatherWarps;
  static_assert(kOwnGroups * 8 <= 32);  // each lane looks up one row at most

  /// A step of keys. Lane i looks up the page of the i-th row of k or v that its warp copies.
  struct Step {
    int32_t num_keys;
    int32_t num_hidden;  // how many of the first keys no query row sees; may be negative
    int32_t head;
    int32_t key;   // the first key; of ragged keys, its row in the tensor
    int32_t page;  // page id of this lane's row
  };
  static constexpr Step kNoStep = {-0x7fffffff, 0, 0, 0, 0};  // no step has so few keys

  /// The warp copies the rows of some of a step's keys. Returns the number in the step of the key
  /// whose row is the i-th of these.
  FLASHPLAN_DEVICE int row(int i) const { return (i / 8 * S::kGatherWarps + warp_) * 8 + i % 8; }

  /// Returns the step of the keys from `key` on, and requests the page id of this lane's row.
  /// `ids`: the page ids of the request.
  FLASHPLAN_DEVICE Step requested(const Sm90Context& context, const int32_t* ids, int32_t head,
                                  int32_t key, int32_t end) const {
    Step step = {end - key, context.block().first_seen(p_) - key, head, key, 0};
    if (ids == nullptr) {
      step.key += context.segment.kv_row;
      return step;
    }
    const int own_row = row(opaque(lane_));
    if (own_row < step.num_keys) step.page = request_page(ids, key + own_row);
    return step;
  }
  /// Where this lane's row is in its page.
  FLASHPLAN_DEVICE uint32_t own_place(const Step& step) const {
    return place_in_page(step.key + row(opaque(lane_)));
  }

  /// Fills this warp's rows of the next slot. Zeros replace rows past the last key, rows of keys
  /// that no query sees, and rows of keys whose page id is outside of the cache: what lies there
  /// may be NaN, and 0 * NaN is NaN.
  template <bool kIsKey>
  FLASHPLAN_DEVICE void fill(const Step& step) {
    if (step.num_keys == kNoStep.num_keys) return;
    const KvView& view = kIsKey ? p_.tensors.k : p_.tensors.v;
    const RowUnits& units = kIsKey ? p_.maps.k_units : p_.maps.v_units;
    const int head_dim = kIsKey ? p_.tensors.head_dim_qk : p_.tensors.head_dim_vo;
    const int own_row = row(opaque(lane_));
    const bool exists = own_row >= step.num_hidden && own_row < step.num_keys;
    const bool on_page = has_page(p_.tensors.pages, step.page);
    if (kIsKey) report_pages(!exists || on_page);
    const uint32_t place_of_row = step.page * units.page + own_place(step) * units.token +
                                  static_cast<uint32_t>(step.head) * units.head;
    const uint32_t own = exists && on_page ? place_of_row : RowUnits::kNoRow;
    mbarrier_wait(smem_.slot_empty(slot_), parity_);
    const uint32_t tile = smem_.slot(slot_);
    const uint32_t full = smem_.slot_full(slot_);
    parity_ ^= static_cast<uint32_t>((slot_ + 1) / S::kSlots);
    slot_ = (slot_ + 1) % S::kSlots;
    if (units.bytes != 0) {
      // This is computed anew, so that no registers are held during the wait.
      const int lane = opaque(lane_);
      const int chunk = lane % kLanesPerRow;
      const int first = lane / kLanesPerRow;  // this lane's row among rows copied at once
      const auto* from = opaque(static_cast<const unsigned char*>(view.data) + chunk * 16);
      const uint32_t to = tile + warp_ * S::Key::kGroupBytes;
      const uint32_t place = S::Key::offset(first, chunk);
      const uint32_t places_end = chunk * 8 < head_dim ? RowUnits::kNoRow : 0;
#pragma unroll
      for (int group = 0; group < kOwnGroups; ++group) {
        if (group * S::kGatherWarps + warp_ >= kGroups) break;
#pragma unroll
        for (int i = 0; i < 8; i += kRowsAtOnce) {
          const uint32_t offset = __shfl_sync(0xffffffffU, own, group * 8 + i + first);
          cp_async_16_padded(
              to + group * S::kGatherWarps * S::Key::kGroupBytes + (place ^ S::Key::offset(i, 0)),
              from + uint64_t{offset} * units.bytes, offset < places_end ? 16 : 0);
        }
      }
      mbarrier_arrive_after_copies(full);
    } else {
      copy_far_rows(view, step, head_dim, tile);
      mbarrier_arrive(full);
    }
  }

  /// Makes the copies of fill() for rows that are not aligned, or whose offsets exceed 32 bits.
  FLASHPLAN_DEVICE void copy_far_rows(const KvView& view, const Step& step, int head_dim,
                                      uint32_t tile) const {
    const unsigned char* const own = row_address(view, step.page, own_place(step), step.head);
    const int lane = opaque(lane_);
    const int chunk = lane % kLanesPerRow;
#pragma unroll 1
    for (int i = 0; i < kOwnGroups * 8; i += kRowsAtOnce) {
      const int number = i + lane / kLanesPerRow;
      const auto* from = shuffled_pointer(own, number) + chunk * 16;
      const int r = row(number);
      const bool exists = r >= step.num_hidden && r < step.num_keys;
      const int num_dims = exists ? head_dim - chunk * 8 : 0;
      if (r < S::kTileKv) copy_unaligned_16<2>(tile + S::Key::offset(r, chunk), from, num_dims);
    }
  }

  int slot_ = 0;         // the next slot to fill
  uint32_t parity_ = 1;  // parity of the phase in which that slot is freed
};

}  // namespace flashplan::device
