// SPDX-License-Identifier: Apache-2.0
// The warp of the sm90_mla producer that brings keys by boxes of tensor maps, and what it has in
// common with the warps that bring keys row by row (row_loader.h).
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/mla/shared_memory.h"

namespace flashplan::device {

/// What all warps that bring keys have in common: the walk over the blocks of a queue.
template <typename S>
class MlaKeyWarp {
 public:
  FLASHPLAN_DEVICE MlaKeyWarp(const AttentionParams& p, const MlaSmem<S>& smem)
      : p_(p), smem_(smem), lane_(static_cast<int>(threadIdx.x) % 32) {}

 protected:
  /// The keys of a block: [key, key + count). No query of the tile sees the first num_hidden keys;
  /// this number may be negative.
  struct Block {
    int32_t key;
    int32_t count;
    int32_t num_hidden;
    int32_t kv_row;
    bool is_prefetched;  // this CTA brings the block to the L2 cache
  };

  /// The keys of a work tile.
  struct Keys {
    int32_t begin;
    int32_t end;
    int32_t first_seen;  // the first key that any query of the tile sees
    int32_t kv_row;  // the segment's row of the page table or lists, or first row of ragged keys
    int32_t qo_len;  // query tokens of the segment
    int32_t row_tile;
    bool is_end;
    bool has_steps;
  };

  /// Calls fill(block, its number in the queue, what request(block) has returned) for each block of
  /// the queue. Before that it calls prefetch() for the next block of the tile, and request() for
  /// the one after it. The row tiles of a request are computed at about the same time, so even row
  /// tiles prefetch even blocks, and odd ones odd blocks, for all of them. Where a request has one
  /// row tile, nothing is prefetched: it would add a tenth to the time (docs/tuning/sm90-mla.md).
  template <typename Request, typename Prefetch, typename Fill>
  FLASHPLAN_DEVICE void for_each_block(Request request, Prefetch prefetch, Fill fill,
                                       const uint32_t* queue_word = nullptr) {
    uint32_t number = 0;
    const auto fill_blocks = [&](const Keys& keys, const Sm90Context&, const auto& block_at) {
      const int32_t begin = keys.begin;
      const int32_t count = num_blocks<S>(begin, keys.end);
      auto next_requested = request(block_at(begin));
      auto requested = next_requested;
      // Turn -1 only prefetches the first block, so that the loop has the only copy of this code.
#pragma unroll 1
      for (int32_t n = -1; n < count; ++n) {
        const int32_t key = begin + n * S::kTileKv;
        const auto later_requested = request(block_at(key + 2 * S::kTileKv));
        // The first block of the queue is loaded at once, so it is not prefetched.
        if (n >= 0 || number > 0) prefetch(block_at(key + S::kTileKv), next_requested);
        if (n >= 0) fill(block_at(key), number++, requested);
        requested = next_requested;
        next_requested = later_requested;
      }
    };
    for_each_tile([](int32_t) {}, fill_blocks, queue_word);
  }
  /// Calls begin_tile(i) before it waits for the record of tile i, also for a tile without blocks
  /// and for the record that marks the end. For a tile with blocks it then calls fill_blocks(its
  /// keys, its context, block_at), where block_at(key) returns the block that begins at `key`.
  /// `queue_word`: this lane's word of QueueStart, or null.
  template <typename BeginTile, typename FillBlocks>
  FLASHPLAN_DEVICE void for_each_tile(BeginTile begin_tile, FillBlocks fill_blocks,
                                      const uint32_t* queue_word = nullptr) {
    for (int32_t i = 0;; ++i) {
      begin_tile(i);
      const Sm90Context& context = smem_.memory.contexts[i % S::kContexts];
      Keys keys;
      if (queue_word != nullptr && i == 0 && p_.tensors.kv_lens == nullptr) {
        keys = first_keys(*queue_word);
      } else {
        mbarrier_wait(smem_.context_full(i), i / S::kContexts & 1);
        RowBlock block = context.block();
        block.rows.row_begin -= first_row_of_cta<S>();
        keys = {context.tile.kv_begin,  context.tile.kv_end,    block.first_seen(p_),
                context.segment.kv_row, context.segment.qo_len, context.tile.row_tile,
                context.is_end != 0,    context.has_steps()};
      }
      if (keys.is_end) return;
      if (keys.has_steps) {
        const bool has_neighbours = keys.qo_len * p_.schedule.group_size.value > p_.schedule.tile_q;
        const auto block_at = [&](int32_t key) -> Block {
          const bool is_own = (key / S::kTileKv + keys.row_tile) % 2 == 0;
          const int32_t kv_row = S::kPairs ? context.segment.kv_row : keys.kv_row;
          return {key, min(max(keys.end - key, 0), S::kTileKv), keys.first_seen - key, kv_row,
                  has_neighbours && is_own};
        };
        fill_blocks(keys, context, block_at);
      }
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(smem_.context_empty(i));
    }
  }

  /// The keys of the first tile, computed from QueueStart. So they are requested before another
  /// warp has finished the tile's record. This is called only if the run reads no lengths on the
  /// device (kv_lens), which would replace the planned ones.
  FLASHPLAN_DEVICE Keys first_keys(uint32_t queue_word) const {
    // The member of QueueStart at an offset in bytes.
    const auto word = [&](int offset) {
      return static_cast<int32_t>(__shfl_sync(0xffffffffU, queue_word, offset / 4));
    };
    constexpr int kTile = FLASHPLAN_OFFSET_OF(QueueStart, tiles);
    constexpr int kSegment = FLASHPLAN_OFFSET_OF(QueueStart, segments);
    const bool is_end =
        word(FLASHPLAN_OFFSET_OF(QueueStart, begin)) >= word(FLASHPLAN_OFFSET_OF(QueueStart, end));
    const int32_t begin = word(kTile + FLASHPLAN_OFFSET_OF(WorkTile, kv_begin));
    const int32_t planned_end = word(kTile + FLASHPLAN_OFFSET_OF(WorkTile, kv_end));
    const int32_t merge = word(kTile + FLASHPLAN_OFFSET_OF(WorkTile, merge));
    const int32_t row_tile = word(kTile + FLASHPLAN_OFFSET_OF(WorkTile, row_tile));
    const int32_t qo_len = word(kSegment + FLASHPLAN_OFFSET_OF(Segment, qo_len));
    const int32_t kv_row = word(kSegment + FLASHPLAN_OFFSET_OF(Segment, kv_row));
    const int32_t end = is_end ? 0 : min(planned_end, p_.tensors.pages.keys_of(kv_row));
    RowBlock block;
    block.rows.row_begin = row_tile * p_.schedule.tile_q;
    block.position = word(kSegment + FLASHPLAN_OFFSET_OF(Segment, position));
    block.keys = {begin, end};
    const bool has_steps = !is_end && (begin < end || merge >= 0);
    return {begin, end, block.first_seen(p_), kv_row, qo_len, row_tile, is_end, has_steps};
  }

  /// Tells the consumers if page ids of keys are outside of the cache. It must be called before the
  /// keys are announced. `on_page`: whether the page id of this lane's keys is inside.
  FLASHPLAN_DEVICE void report_pages(bool on_page) const {
    if (__all_sync(0xffffffffU, on_page) == 0) store_shared_4(smem_.on_pages(), kSomeOffPages);
  }
  /// Once the boxes of a block have arrived, replaces the rows behind the last key by zeros. Then
  /// announces the left and the right half of the block at the barriers full(0) and full(1).
  template <typename Full>
  FLASHPLAN_DEVICE void hide_rows(const Block& block, uint32_t number, Full full) {
    if (lane_ == 0) mbarrier_arrive(smem_.tail_full());
    mbarrier_wait(smem_.tail_full(), tail_parity_);
    tail_parity_ ^= 1;
#pragma unroll 1
    for (int row = block.count + lane_ / 8; row < S::kTileKv; row += 4) {
#pragma unroll 1
      for (int i = 0; i < 2 * S::Half::kBlocks; ++i) {
        const int part = i / S::Half::kBlocks;
        store_shared_16(
            smem_.half(number, part) + S::Half::offset(row, i % S::Half::kBlocks * 8 + lane_ % 8),
            {0, 0, 0, 0});
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane_ < 2) mbarrier_arrive(full(lane_));
  }
  static FLASHPLAN_DEVICE void wait(MbarrierPhase phase) {
    mbarrier_wait(phase.barrier, phase.parity);
  }
  /// Starts to load the id of the page of a row's key.
  FLASHPLAN_DEVICE int32_t request_page_id(const Block& block, int row) const {
    const PageTable& pages = p_.tensors.pages;
    if (row >= block.count || pages.ids == nullptr) return 0;
    const auto key = static_cast<uint32_t>(block.key + row);
    return static_cast<int32_t>(
        load_global_4(page_ids(pages, block.kv_row) + quotient(key, pages.page_size)));
  }

  const AttentionParams& p_;
  const MlaSmem<S> smem_;
  const int lane_;

 private:
  uint32_t tail_parity_ = 0;  // parity of the phase of tail_full() that comes next
};

/// Works as one warp, whose lane i brings box i of each half of a block.
template <typename S>
class MlaBoxLoader : MlaKeyWarp<S> {
  using Base = MlaKeyWarp<S>;
  using Block = typename Base::Block;

 public:
  using Base::Base;

  /// `queue_word`: this lane's word of QueueStart, from MlaRecordLoader::request_queue().
  FLASHPLAN_DEVICE void run(uint32_t queue_word) {
    const int row = lane_ * p_.maps.box_rows;
    Base::for_each_block(
        [&](const Block& block) { return Base::request_page_id(block, row); },
        [&](const Block& block, int32_t id) { prefetch(block, row, id); },
        [&](const Block& block, uint32_t number, int32_t id) { fill(block, number, row, id); },
        &queue_word);
  }

 private:
  using Base::lane_;
  using Base::p_;
  using Base::smem_;

  /// Whether some query of the tile sees some key of the box that begins at row `row` of the block.
  FLASHPLAN_DEVICE bool is_seen(const Block& block, int row) const {
    return row + p_.maps.box_rows > block.num_hidden;
  }
  FLASHPLAN_DEVICE bool is_on_page(int32_t id) const {
    return has_page(p_.tensors.pages, static_cast<uint32_t>(id));
  }
  /// The number, in its page, of the group of 8 rows in which a box begins.
  FLASHPLAN_DEVICE int group_of(const Block& block, int row) const {
    return static_cast<int>(row_in_page(p_.tensors.pages, static_cast<uint32_t>(block.key + row))) /
           8;
  }

  /// Brings the keys of a block to the L2 cache. Shared memory has room for two blocks alone, so a
  /// block is requested shortly before it is needed. By then it should be in the cache, which
  /// answers in half the time of memory.
  FLASHPLAN_DEVICE void prefetch(const Block& block, int row, int32_t id) const {
    if (!block.is_prefetched || row >= block.count) return;
    if (!is_seen(block, row) || !is_on_page(id)) return;
    const int group = group_of(block, row);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      tma_prefetch_5d(&p_.maps.k, 0, 0, part * (S::kHalfDims / 64), group, id);
    }
    if (S::kTailDims > 0) tma_prefetch_5d(&p_.maps.k_tail, 0, 0, 0, group, id);
  }

  FLASHPLAN_DEVICE void fill(const Block& block, uint32_t number, int row, int32_t id) {
    const int box_rows = p_.maps.box_rows;
    const bool has_box = row < block.count;
    // A box without a page is requested from outside of the map, and so becomes zeros. So does a
    // box whose keys no query sees: its page may belong to another request.
    Base::report_pages(!has_box || !is_seen(block, row) || is_on_page(id));
    const int page = is_seen(block, row) && is_on_page(id) ? id : -1;
    const int group = group_of(block, row);
    const int rows_of_boxes = __popc(__ballot_sync(0xffffffffU, has_box)) * box_rows;
    const uint32_t half_bytes = rows_of_boxes * S::kHalfDims * 2;
    const uint32_t tail_bytes = rows_of_boxes * S::kTailDims * 2;
    // Values past the last key have weights of 0, but 0 * NaN is NaN: hide_rows() replaces these
    // values by zeros before the consumers see the block. The tail needs no zeros: logits past the
    // last key are masked.
    const bool hides = block.count < S::kTileKv;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      Base::wait(smem_.emptied(number, part));
      const uint32_t full = hides ? smem_.tail_full() : smem_.full(number, part).barrier;
      if (lane_ == 0) {
        const uint32_t bytes = half_bytes + (part == 1 ? tail_bytes : 0);
        if (hides) {
          mbarrier_expect(full, bytes);
        } else {
          mbarrier_arrive_expect(full, bytes);
        }
      }
      __syncwarp();
      if (has_box) {
        tma_load_5d(smem_.half(number, part) + row * S::kHalfDims * 2, &p_.maps.k, full, 0, 0,
                    part * (S::kHalfDims / 64), group, page);
        if (part == 1 && S::kTailDims > 0) {
          tma_load_5d(smem_.tail(number) + row * S::kTailDims * 2, &p_.maps.k_tail, full, 0, 0, 0,
                      group, page);
        }
      }
    }
    if (hides) {
      Base::hide_rows(block, number, [&](int part) { return smem_.full(number, part).barrier; });
    }
  }
};

}  // namespace flashplan::device
