// SPDX-License-Identifier: Apache-2.0
// The warps of the sm90 family that widen 8-bit keys and values to the 16 bits that wgmma reads.
#pragma once

#include "kernels/device/sm90/preparer.h"
#include "kernels/device/sm90/ring_position.h"
#include "kernels/device/sm90/widening.h"

namespace flashplan::device {

/// One of the warps that widen. Keys and values that many row tiles read are prepared: widened
/// once, to the workspace. Those of other work tiles are widened to the slots of the ring, where
/// each warp has the same S::kPartRows rows of every slot. While it widens its rows of a slot,
/// those of the next slots are being copied.
template <typename S>
class Sm90Widener : Sm90ProducerWarp<S> {
  using Base = Sm90ProducerWarp<S>;

 public:
  FLASHPLAN_DEVICE Sm90Widener(const AttentionParams& p, const Sm90Smem<S>& smem, int warp)
      : Base(p, smem, warp) {}

  /// Takes slots in the order in which the consumers use them: the keys of a step, then the values
  /// of the step before it. Page ids are requested one step ahead, since on a busy GPU they take as
  /// long to arrive as the keys.
  FLASHPLAN_DEVICE void run() {
    Step last = {kNone, 0, 0, 0};  // the step whose keys have a slot, but not yet its values
    // The step whose page ids are requested, and whose keys have no slot yet.
    Step ahead = {kNone, 0, 0, 0};
    int32_t i = 0;
#pragma unroll 1
    for (;;) {
      const Sm90Context& context = wait_context(i);
      const bool has_steps = context.has_steps();
      const bool prepares = has_steps && is_prepared(i);
      const bool fills = has_steps && !prepares;
      int32_t begin = 0;
      int32_t end = 0;
      int32_t head = 0;
      // Before a tile without keys, and before the end of the queue, the consumers finish the last
      // tile with keys, so they wait for its last values. Before a prepared tile, these values are
      // filled, too, behind the slot of the tile's first keys. Three rounds of the loop, in which
      // this warp requests no rows, do all of this.
      int32_t heads_end = 3;
      const int32_t* ids = nullptr;
      if (fills) {
        begin = context.tile.kv_begin;
        end = context.tile.kv_end;
        head = context.tile.kv_head;
        heads_end = head + context.tile.num_kv_heads;
        ids = page_ids(p_.tensors.pages, context.segment.kv_row);
      }
      int32_t key = begin;
#pragma unroll 1
      do {
        Step step = {prepares && head == 0 ? kOthers : kNone, 0, 0, 0};
        if (fills) step = requested(context, ids, head, key, end);
        Step filled = ahead;
#pragma unroll 1
        for (int kind = 0; kind < 2; ++kind) {  // a loop, so that there is one copy of fill()
          fill(kind == 0, filled);
          filled = last;
        }
        last = ahead;
        ahead = step;
        key += S::kTileKv;
        if (key >= end) {
          key = begin;
          ++head;
        }
      } while (head < heads_end);
      if (context.is_end) return;
      if (prepares) {
        uint32_t num_steps = 0;
        i = Sm90Preparer<S>(p_, smem_, warp_).prepare_from(i, num_steps);
        // Skips the slots of the prepared steps, except those of the first keys and of the last
        // values.
        ring_.skip(2 * (num_steps - 1));
        last.rows = kNone;
        ahead.rows = kOthersValues;
      } else {
        release_context(i);
        ++i;
      }
    }
  }

 private:
  using Base::is_prepared;
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
  using Widening = Sm90Widening<S>;

  static_assert(S::kTileKv == S::kPreparingWarps * S::kPartRows);

  /// This warp's rows of a step of keys, of which each lane has one.
  struct Step {
    // begin + 256 * end: rows [begin, end) of this warp are copied, its other rows become zeros.
    int32_t rows;
    int32_t head;
    int32_t key;   // the first key; of ragged keys, its row of the tensor
    int32_t page;  // page id of this lane's row
  };
  // Negative values of Step::rows: this warp copies no rows.
  static constexpr int32_t kNone = -3;          // there is no step
  static constexpr int32_t kOthers = -2;        // other warps fill the slot of its keys
  static constexpr int32_t kOthersValues = -1;  // other warps fill the slot of its values

  /// This lane's row of a step.
  FLASHPLAN_DEVICE int row() const { return warp_ * S::kPartRows + opaque(lane_); }

  /// Returns the step of the keys from `key` on, and requests the page id of this lane's row.
  /// `ids`: the page ids of the request.
  FLASHPLAN_DEVICE Step requested(const Sm90Context& context, const int32_t* ids, int32_t head,
                                  int32_t key, int32_t end) const {
    const int32_t first = key + warp_ * S::kPartRows;
    const int32_t rows_begin = min(max(context.block().first_seen(p_) - first, 0), S::kPartRows);
    const int32_t rows_end = min(max(end - first, 0), S::kPartRows);
    Step step = {rows_begin + 256 * rows_end, head, key, 0};
    if (ids == nullptr) {
      step.key += context.segment.kv_row;
      return step;
    }
    if (opaque(lane_) < rows_end) step.page = request_page(ids, key + row());
    return step;
  }

  /// Requests this warp's rows of the next slot, and widens those that were requested two slots
  /// before. Zeros replace rows past the last key, rows of keys that no query sees, and rows of
  /// keys whose page id is outside of the cache: what lies there may be NaN, and 0 * NaN is NaN.
  /// Without a slot to fill, widens all rows that were requested.
  FLASHPLAN_DEVICE void fill(bool is_key, Step step) {
    const bool requests = step.rows >= 0;
    if (requests) {
      const KvView& view = is_key ? p_.tensors.k : p_.tensors.v;
      const int head_dim = is_key ? p_.tensors.head_dim_qk : p_.tensors.head_dim_vo;
      const int rows_begin = step.rows % 256;
      const int rows_end = step.rows / 256;
      const bool exists = lane_ >= rows_begin && lane_ < rows_end;
      if (is_key) report_pages(!exists || has_page(p_.tensors.pages, step.page));
      const unsigned char* const from =
          row_address(view, step.page, place_in_page(step.key + row()), step.head);
      const int slot = ring_.wait_free(smem_, lane_);
      Widening::request(p_, wide_rows(slot) + S::kPartBytes / 2, from, rows_begin, rows_end,
                        head_dim);
      cp_async_commit();
      filling_ = filling_ << 4 | static_cast<uint32_t>(slot << 1 | static_cast<int>(is_key));
      ++num_filling_;
    }
    const bool takes_slot = requests || step.rows == (is_key ? kOthers : kOthersValues);
    ring_.skip(static_cast<uint32_t>(takes_slot));
#pragma unroll 1
    while (num_filling_ > (requests ? kMostFilling : 0)) {
      if (requests) {
        cp_async_wait<kMostFilling>();
      } else {
        cp_async_wait<0>();
      }
      __syncwarp();
      --num_filling_;
      const auto oldest = static_cast<int>(filling_ >> num_filling_ * 4 & 15);
      const uint32_t rows = wide_rows(oldest / 2);
      Widening::widen(oldest % 2 != 0, rows + S::kPartBytes / 2, rows);
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(smem_.slot_full(oldest / 2));
    }
  }

  // The most slots that this warp is filling when it waits for another slot to become free. To free
  // the awaited slot, the consumers may first need the slot after it, so the slot after it must not
  // be among those that this warp is still filling.
  static constexpr int kMostFilling = 2;
  static_assert(S::kSlots >= kMostFilling + 2);
  FLASHPLAN_DEVICE uint32_t wide_rows(int slot) const {
    return smem_.slot(slot) + warp_ * S::kPartBytes;
  }

  Sm90RingPosition<S> ring_;
  // Slots that are being filled: this warp's 8-bit rows are requested, to the second half of the
  // place where their 16 bits will be. Each slot has four bits: 2 * its number, plus 1 if it gets
  // keys. The latest slot has the lowest bits; bits above those of num_filling_ slots have no
  // meaning.
  uint32_t filling_ = 0;
  int num_filling_ = 0;
};

}  // namespace flashplan::device
