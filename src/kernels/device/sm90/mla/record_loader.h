// SPDX-License-Identifier: Apache-2.0
// The warp of the sm90_mla producer that brings the records of work tiles, and queries.
#pragma once

#include "kernels/device/attention_state.h"
#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/mla/shared_memory.h"
#include "kernels/device/sm90/queue_records.h"
#include "kernels/device/unaligned_copy.h"

namespace flashplan::device {

template <typename S>
class MlaRecordLoader {
 public:
  FLASHPLAN_DEVICE MlaRecordLoader(const AttentionParams& p, const MlaSmem<S>& smem)
      : p_(p), smem_(smem), lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// Starts to load QueueStart, the bounds of the queue and its first records. Each lane gets a
  /// word, in two warps: kRecordWarp, which calls run(), and the warp before it, which brings keys
  /// by boxes.
  static FLASHPLAN_DEVICE uint32_t request_queue(const AttentionParams& p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    uint32_t word = 0;
    if (warp >= 4 * S::kWarpgroups && warp <= 4 * S::kWarpgroups + S::kRecordWarp &&
        lane < RecordWords::kQueue) {
      const auto* words =
          reinterpret_cast<const uint32_t*>(p.schedule.starts + blockIdx.x / S::kCtas);
      word = load_global_4(words + lane);
    }
    return word;
  }

  /// `queue_word`: this lane's word of QueueStart, from request_queue().
  FLASHPLAN_DEVICE void run(uint32_t queue_word) {
    begin_queue(queue_word);
    for (int32_t i = 0;; ++i) {
      load_records(i);
      const Sm90Context& context = smem_.memory.contexts[i % S::kContexts];
      if (context.is_end) return;
      if (context.has_steps()) load_queries(context);
    }
  }

  // The three steps of run(), for a warp that has other work between them.

  /// Takes the bounds of the queue, and stores the records of its first tiles in shared memory.
  /// `word`: this lane's word of QueueStart.
  FLASHPLAN_DEVICE void begin_queue(uint32_t word) {
    queue_begin_ = static_cast<int32_t>(__shfl_sync(0xffffffffU, word, RecordWords::kBegin));
    num_tiles_ =
        static_cast<int32_t>(__shfl_sync(0xffffffffU, word, RecordWords::kEnd)) - queue_begin_;
    const int index = lane_ - RecordWords::kTiles;
    if (index >= 0 && index < RecordWords::kAllFirst) {
      const RecordPlace to = first_record_place(index);
      store_shared_4(smem_.context(to.record) + to.word * 4, word);
    }
  }

  /// Loads the records of the tiles up to the one that is kRecordsAhead tiles behind tile `i`.
  FLASHPLAN_DEVICE void load_records(int32_t i) {
    while (num_records_ <= min(num_tiles_, i + kRecordsAhead)) load_record();
  }

  /// Loads the queries of a tile with steps, when those of the tile before are not needed any more.
  FLASHPLAN_DEVICE void load_queries(const Sm90Context& context) {
    mbarrier_wait(smem_.q_empty(), (num_loaded_ & 1) ^ 1);
    ++num_loaded_;
    const PackedRows rows = context.block().rows;
    if (p_.maps.has_q) {
      load_by_map(rows);
    } else {
      copy_rows(rows);
    }
  }

 private:
  static constexpr int kRecordsAhead = 2;
  static_assert(kRecordsAhead < S::kContexts - 1);
  static constexpr int kTileWords = RecordWords::kTile;
  static constexpr int kSegmentWords = RecordWords::kSegment;

  /// Loads the next record, if begin_queue() has not, and announces it. After the last tile comes
  /// one more record, which marks the end.
  FLASHPLAN_DEVICE void load_record() {
    const int32_t i = num_records_++;
    const uint32_t to = smem_.context(i);
    mbarrier_wait(smem_.context_empty(i), (i / S::kContexts & 1) ^ 1);
    if (i >= RecordWords::kFirstRecords && i < num_tiles_) {
      const auto* tile = reinterpret_cast<const uint32_t*>(p_.schedule.tiles + queue_begin_ + i);
      const uint32_t word = lane_ < kTileWords ? tile[lane_] : 0;
      if (lane_ < kTileWords) store_shared_4(to + lane_ * 4, word);
      const auto index = static_cast<int32_t>(__shfl_sync(0xffffffffU, word, 0));
      const auto* segment = reinterpret_cast<const uint32_t*>(p_.schedule.segments + index);
      if (lane_ < kSegmentWords) {
        store_shared_4(to + sizeof(WorkTile) + lane_ * 4, segment[lane_]);
      }
    }
    __syncwarp();
    if (lane_ == 0) {
      Sm90Context& context = smem_.memory.contexts[i % S::kContexts];
      context.is_end = i >= num_tiles_;
      if (!context.is_end) finish(context, smem_.memory.num_states[i % S::kContexts]);
      mbarrier_arrive(smem_.context_full(i));
    }
    __syncwarp();  // the other lanes read the record, too
  }

  FLASHPLAN_DEVICE void finish(Sm90Context& context, int32_t& num_states) const {
    const WorkTile& tile = context.tile;
    num_states = 1;
    if (tile.merge >= 0) {
      // When the tile ends, one thread reads the merge and its counter. Without these prefetches
      // it would wait for memory.
      prefetch_l2(counter_of(p_, tile.merge));
      prefetch_l2(p_.schedule.merges + tile.merge);
      if (p_.schedule.chunk_kv > 0) {
        num_states = num_chunk_states(tile, p_.schedule.merges[tile.merge], p_);
      }
    }
    context.finish(p_, S::kTileKv);
    if constexpr (S::kPairs) {
      const int32_t first_row = first_row_of_cta<S>();
      context.row_begin += first_row;
      context.num_rows = min(max(context.num_rows - first_row, 0), S::kTileQ);
    }
    // The list of a token may have fewer entries than planned.
    const KeyLists& lists = p_.lists;
    if (lists.slots != nullptr) context.tile.kv_end = min(context.tile.kv_end, lists.size);
  }

  /// Loads queries by boxes of some heads of a token. Rows of padding keep what was there: each row
  /// of a product depends on its own query alone, and nobody reads the results of these rows.
  FLASHPLAN_DEVICE void load_by_map(const PackedRows& rows) const {
    const int box_rows = p_.maps.q_box_rows;
    const int num_boxes = rows.num_rows / box_rows;
    if (lane_ == 0) {
      mbarrier_arrive_expect(smem_.q_full(), rows.num_rows * S::kHeadDimQk * 2);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane_; i < num_boxes * S::Query::kBlocks; i += 32) {
      const int block = i / num_boxes;
      const int row = (i - block * num_boxes) * box_rows;
      const auto token = static_cast<int>(rows.token(row, p_.schedule.group_size));
      const int head = rows.qo_head(0, row, p_.schedule.group_size);
      const bool is_tail = block * 64 >= S::kHeadDimVo;
      tma_load_3d(smem_.queries() + block * S::Query::kBlockBytes + row * 128,
                  is_tail ? &p_.maps.q_tail : &p_.maps.q, smem_.q_full(), is_tail ? 0 : block * 64,
                  head, token);
    }
  }

  /// Copies queries, which no tensor map describes, row by row.
  __device__ __noinline__ void copy_rows(const PackedRows& rows) const {
    const auto of_row = [&](const TokenView<const void>& view, int row) {
      return static_cast<const unsigned char*>(view.data) +
             2 * (rows.token(row, p_.schedule.group_size) * view.token_stride +
                  rows.qo_head(0, row, p_.schedule.group_size) * view.head_stride);
    };
    const int chunk = lane_ % 8;
#pragma unroll 1
    for (int row = lane_ / 8; row < rows.num_rows; row += 4) {
      const unsigned char* from = of_row(p_.tensors.q, row) + chunk * 16;
      const unsigned char* tail = from + S::kHeadDimVo * 2;
      if (p_.tails.q_dims > 0) tail = of_row(p_.tails.q, row) + chunk * 16;
#pragma unroll 1
      for (int block = 0; block < S::Query::kBlocks; ++block) {
        const bool is_tail = block * 64 >= S::kHeadDimVo;
        const uint32_t to = smem_.queries() + S::Query::offset(row, block * 8 + chunk);
        const unsigned char* source = is_tail ? tail : from + block * 128;
        if (p_.tensors.vectorized) {
          cp_async_16(to, source);
        } else {
          copy_unaligned_16<2>(to, source, 8);
        }
      }
    }
    cp_async_wait_all();
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(smem_.q_full());
  }

  const AttentionParams& p_;
  const MlaSmem<S> smem_;
  const int lane_;
  int32_t queue_begin_ = 0;
  int32_t num_tiles_ = 0;
  int32_t num_records_ = 0;  // records loaded so far
  uint32_t num_loaded_ = 0;  // tiles whose queries are loaded
};

}  // namespace flashplan::device
