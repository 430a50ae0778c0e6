// SPDX-License-Identifier: Apache-2.0
// Copies the keys and values that a warp of FewRows uses to the warp's stages in shared memory.
#pragma once

#include "kernels/device/sm80/tile_context.h"

namespace flashplan::device {

/// Walks through a warp's steps for kHeads kv heads at once, and then again for each next kHeads
/// heads. A step is the work of the warp on S::kKeys of its keys.
template <typename T, int kHeads>
class FewRowsPipeline {
  using S = FewRowsShape<T, kHeads>;
  using Tile = typename S::Tile;

 public:
  /// For kv heads [head, heads_end). `base`: the address of the CTA's dynamic shared memory.
  FLASHPLAN_DEVICE FewRowsPipeline(const AttentionParams& p, const TileContext& context,
                                   uint32_t base, int warp, int lane, int32_t head,
                                   int32_t heads_end)
      : p_(p),
        context_(context),
        warp_(warp),
        lane_(lane),
        stages_(base + FLASHPLAN_OFFSET_OF(typename S::Memory, stages) +
                warp * S::kStages * S::kStageBytes),
        own_ids_(base + FLASHPLAN_OFFSET_OF(typename S::Memory, ids) +
                 warp * S::kStages * S::kIdsBytes + lane * 4),
        ids_(context.page_ids),
        heads_end_(heads_end) {
    const KvView& view = finds_values() ? p.tensors.v : p.tensors.k;
    data_ = static_cast<const unsigned char*>(view.data);
    page_stride_ = view.page_stride * S::kBytes;
    token_stride_ = view.token_stride * S::kBytes;
    head_stride_ = view.head_stride * S::kBytes;
    asked_ = copied_ = {first_key(), first_key() < context.block.keys.end ? head : heads_end};
  }

  /// The first key of this warp's first step. Each later step begins S::kStepKeys keys further on.
  FLASHPLAN_DEVICE int32_t first_key() const {
    return context_.block.keys.begin + warp_ * S::kKeys;
  }
  /// The address of a stage, which has the keys of each head, then the values of each head.
  FLASHPLAN_DEVICE uint32_t stage_address(uint32_t stage) const {
    return stages_ + stage * S::kStageBytes;
  }

  /// Requests the page ids of the next step, which copy() will bring to `stage`.
  FLASHPLAN_DEVICE void request_ids(uint32_t stage) {
    if (ids_ != nullptr && asked_.head < heads_end_) {
      cp_async_4(own_ids_ + stage * S::kIdsBytes,
                 ids_ + quotient(own_key(asked_), p_.tensors.pages.page_size));
    }
    advance(asked_);
  }
  /// Starts to copy the keys and values of the next step to `stage`.
  FLASHPLAN_DEVICE void copy(uint32_t stage) {
    const uint32_t to = stage_address(stage);
    const int32_t head = copied_.head;
    if (head >= heads_end_) return;
    uint32_t in_page = own_key(copied_);
    uint32_t page = 0;
    if (ids_ == nullptr) {
      in_page += static_cast<uint32_t>(context_.block.kv_row);
    } else {
      const PageTable& pages = p_.tensors.pages;
      in_page = row_in_page(pages, in_page);
      page = load_shared_4(own_ids_ + stage * S::kIdsBytes);
    }
    advance(copied_);
    const bool exists = has_page(p_.tensors.pages, page);
    const bool all_exist = __all_sync(0xffffffffU, exists) != 0;
    if (!all_exist) store_shared_4(shared_address(&context_.on_pages), kSomeOffPages);
    const unsigned char* row = data_ + page * page_stride_ + in_page * token_stride_ +
                               static_cast<uint32_t>(head) * head_stride_;
    copy_any_rows(exists ? row : nullptr, all_exist, p_.tensors.k, 0, to);
    if constexpr (S::kKeys == 16) {
      copy_any_rows(exists ? row : nullptr, all_exist, p_.tensors.v, 16,
                    to + kHeads * S::kTileBytes);
    } else {
      const KvView& view = p_.tensors.v;
      row = static_cast<const unsigned char*>(view.data) +
            (page * view.page_stride + in_page * view.token_stride +
             static_cast<uint32_t>(head) * view.head_stride) *
                S::kBytes;
      copy_any_rows(exists ? row : nullptr, all_exist, view, 0, to + kHeads * S::kTileBytes);
    }
  }

 private:
  /// The first key and the first head of a step of this warp. When no step is left, the head is
  /// heads_end_.
  struct Step {
    int32_t key;
    int32_t head;
  };

  FLASHPLAN_DEVICE void advance(Step& step) const {
    const KeySpan& keys = context_.block.keys;
    step.key += S::kStepKeys;
    if (step.key >= keys.end) {
      step.key = first_key();
      step.head += kHeads;
    }
  }
  /// The key whose row of k or v this lane finds. The first key that any query row sees replaces
  /// the keys before it, and the last key replaces the keys past it.
  FLASHPLAN_DEVICE uint32_t own_key(const Step& step) const {
    const int32_t key = max(step.key + lane_ % S::kKeys, context_.first_seen);
    return static_cast<uint32_t>(min(key, context_.block.keys.end - 1));
  }
  /// In steps of 16 keys, half of the lanes find the rows of keys, and the other half the rows of
  /// values. In steps of 32 keys, each lane finds both rows of one key.
  FLASHPLAN_DEVICE bool finds_values() const { return S::kKeys == 16 && lane_ >= 16; }

  /// Starts the copies of a step's keys, or of its values, for all kHeads heads. `own_row` of lane
  /// first_lane + i is the address of key i's row of the first head, or null if key i's page id is
  /// outside of the cache; the row then becomes zeros. `all_exist`: no lane has a null.
  FLASHPLAN_DEVICE void copy_any_rows(const unsigned char* own_row, bool all_exist,
                                      const KvView& view, int first_lane, uint32_t to) const {
    const int64_t head_stride = view.head_stride * S::kBytes;
    if (__builtin_expect(static_cast<long>(p_.tensors.vectorized && all_exist), 1L) != 0) {
      copy_rows<true>(own_row, head_stride, first_lane, to, lane_);
    } else {
      copy_rare_rows(own_row, head_stride, first_lane, to, lane_);
    }
  }
  static __device__ __noinline__ void copy_rare_rows(const unsigned char* own_row,
                                                     int64_t head_stride, int first_lane,
                                                     uint32_t to, int lane) {
    copy_rows<false>(own_row, head_stride, first_lane, to, lane);
  }
  /// Makes the copies of copy_any_rows(). `kAligned`: all rows exist, and are copied 16 bytes at a
  /// time.
  template <bool kAligned>
  static FLASHPLAN_DEVICE void copy_rows(const unsigned char* own_row, int64_t head_stride,
                                         int first_lane, uint32_t to, int lane) {
    // The number of lanes that together copy a key's rows of kHeads heads.
    constexpr int kLanes = kHeads * Tile::kChunks;
    static_assert(kLanes <= 32);
    constexpr int kKeysAtOnce = kLanes > 16 ? 1 : kLanes > 8 ? 2 : kLanes > 4 ? 4 : 8;
    constexpr bool kWholeLines = kHeads * Tile::kRowBytes % 128 == 0;
    const int chunk = lane % Tile::kChunks;
    const int head = lane / Tile::kChunks % kHeads;
    const int64_t offset = chunk * 16 + (kHeads > 1 ? head * head_stride : 0);
    to += head * S::kTileBytes;
#pragma unroll kAligned ? S::kKeys : 1
    for (int i = 0; i < S::kKeys; i += kKeysAtOnce) {
      const int r = i + min(lane / kLanes, kKeysAtOnce - 1);
      const unsigned char* row = shuffled_pointer(own_row, first_lane + r);
      const unsigned char* from = row + offset;
      const uint32_t at = to + Tile::offset(r, chunk);
      if constexpr (kAligned && kWholeLines) {
        cp_async_16(at, from);
      } else if (lane < kKeysAtOnce * kLanes) {
        if constexpr (kAligned) {
          cp_async_16_padded(at, from, 16);
        } else {
          copy_unaligned_16<S::kBytes>(at, from, row == nullptr ? 0 : 16 / S::kBytes);
        }
      }
    }
  }

  const AttentionParams& p_;
  const TileContext& context_;
  const int warp_;
  const int lane_;
  const uint32_t stages_;   // address of this warp's stages
  const uint32_t own_ids_;  // address in shared memory of this lane's page id for stage 0
  const int32_t* const ids_;
  const int32_t heads_end_;
  Step asked_;   // the step whose page ids request_ids() requests next
  Step copied_;  // the step whose keys and values copy() copies next
  // The tensor k, or v for lanes that find only values; strides are in bytes.
  const unsigned char* data_;
  int64_t page_stride_;
  int64_t token_stride_;
  int64_t head_stride_;
};

}  // namespace flashplan::device
