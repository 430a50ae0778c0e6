// SPDX-License-Identifier: Apache-2.0
// The warp of the sm90_wide producer that brings the records of work tiles, and queries.
#pragma once

#include "kernels/device/sm90/mla/record_loader.h"
#include "kernels/device/sm90/wide/row_copy.h"

namespace flashplan::device {

/// Loads a record for each kv head of a work tile, and its queries.
template <typename S>
class WideRecordLoader {
 public:
  FLASHPLAN_DEVICE WideRecordLoader(const AttentionParams& p, const MlaSmem<S>& smem)
      : p_(p), smem_(smem), lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// `queue_word`: this lane's word of QueueStart, from MlaRecordLoader::request_queue().
  FLASHPLAN_DEVICE void run(uint32_t queue_word) {
    queue_word_ = queue_word;
    queue_begin_ = static_cast<int32_t>(word_of_queue(RecordWords::kBegin));
    num_tiles_ = static_cast<int32_t>(word_of_queue(RecordWords::kEnd)) - queue_begin_;
    for (int32_t i = 0;; ++i) {
      while (!has_end_ && num_records_ <= i + kRecordsAhead) load_record();
      const Sm90Context& context = smem_.memory.contexts[i % S::kContexts];
      if (context.is_end) return;
      if (context.has_steps()) load_queries(context);
    }
  }

 private:
  static constexpr int kRecordsAhead = 2;
  static_assert(kRecordsAhead < S::kContexts - 1);
  static constexpr int kTileWords = RecordWords::kTile;
  static constexpr int kSegmentWords = RecordWords::kSegment;

  FLASHPLAN_DEVICE uint32_t word_of_queue(int i) const {
    return __shfl_sync(0xffffffffU, queue_word_, min(i, 31));
  }

  /// Takes the words of the next tile of the queue: the first lanes have those of the tile, the
  /// next lanes those of its segment.
  FLASHPLAN_DEVICE void take_tile() {
    if (tile_ < RecordWords::kFirstRecords) {
      const bool is_tile = lane_ < kTileWords;
      const int of_tile = RecordWords::kTiles + tile_ * kTileWords + lane_;
      const int of_segment = RecordWords::kSegments + tile_ * kSegmentWords + lane_ - kTileWords;
      word_ = word_of_queue(is_tile ? of_tile : of_segment);
    } else {
      const auto* tile =
          reinterpret_cast<const uint32_t*>(p_.schedule.tiles + queue_begin_ + tile_);
      word_ = lane_ < kTileWords ? load_global_4(tile + lane_) : 0;
      const auto index = static_cast<int32_t>(__shfl_sync(0xffffffffU, word_, 0));
      const auto* segment = reinterpret_cast<const uint32_t*>(p_.schedule.segments + index);
      const int place = lane_ - kTileWords;
      if (place >= 0 && place < kSegmentWords) word_ = load_global_4(segment + place);
    }
    ++tile_;
  }

  /// Writes the record of the next kv head, and announces it. After the last tile comes one more
  /// record, which marks the end.
  FLASHPLAN_DEVICE void load_record() {
    const int32_t i = num_records_++;
    mbarrier_wait(smem_.context_empty(i), (i / S::kContexts & 1) ^ 1);
    const bool needs_tile = head_ == num_heads_;
    has_end_ = needs_tile && tile_ >= num_tiles_;
    if (!has_end_) {
      if (needs_tile) take_tile();
      if (lane_ < kTileWords + kSegmentWords) store_shared_4(smem_.context(i) + lane_ * 4, word_);
      if (needs_tile) {
        head_ = 0;
        constexpr int kNumHeads = FLASHPLAN_OFFSET_OF(WorkTile, num_kv_heads) / 4;
        num_heads_ = static_cast<int32_t>(__shfl_sync(0xffffffffU, word_, kNumHeads));
      }
    }
    __syncwarp();
    if (lane_ == 0) {
      Sm90Context& context = smem_.memory.contexts[i % S::kContexts];
      context.is_end = has_end_ ? 1 : 0;
      if (!has_end_) finish(context, smem_.memory.num_states[i % S::kContexts]);
      mbarrier_arrive(smem_.context_full(i));
    }
    __syncwarp();  // the other lanes read the record, too
    ++head_;
  }

  /// Finishes the record of one kv head. A tile that belongs to a merge has only one kv head, so
  /// its partial_row and merge need no change.
  FLASHPLAN_DEVICE void finish(Sm90Context& context, int32_t& num_states) const {
    WorkTile& tile = context.tile;
    num_states = 1;
    if (p_.schedule.chunk_kv > 0 && tile.merge >= 0) {
      num_states = num_chunk_states(tile, p_.schedule.merges[tile.merge], p_);
    }
    context.finish(p_, S::kTileKv);
    tile.kv_head += head_;
    tile.num_kv_heads = 1;
  }

  /// Loads the queries of a tile with steps, when those of the tile before are not needed any more.
  FLASHPLAN_DEVICE void load_queries(const Sm90Context& context) {
    mbarrier_wait(smem_.q_empty(), (num_loaded_ & 1) ^ 1);
    ++num_loaded_;
    const PackedRows rows = context.block().rows;
    const int32_t kv_head = context.tile.kv_head;
    if (p_.maps.has_q) {
      load_by_map(rows, kv_head);
    } else {
      copy_queries(p_, smem_.queries(), smem_.q_full(), rows, kv_head);
    }
  }

  /// Loads queries by boxes. Rows past the last one get queries of other requests: each row of a
  /// product depends on its own query alone, and nobody reads the results of these rows.
  FLASHPLAN_DEVICE void load_by_map(const PackedRows& rows, int32_t kv_head) const {
    const Divisor& group_size = p_.schedule.group_size;
    if (lane_ == 0) mbarrier_arrive_expect(smem_.q_full(), S::kQBytes);
    __syncwarp();
    if (lane_ >= S::Query::kBlocks) return;
    tma_load_3d(smem_.queries() + lane_ * S::Query::kBlockBytes, &p_.maps.q, smem_.q_full(),
                lane_ * 64, kv_head * group_size.value,
                static_cast<int>(rows.token(0, group_size)));
  }

  /// Copies queries, which no tensor map describes, row by row.
  static __device__ __noinline__ void copy_queries(const AttentionParams& p, uint32_t to,
                                                   uint32_t full, PackedRows rows,
                                                   int32_t kv_head) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int chunk = lane % 8;
#pragma unroll 1
    for (int row = lane / 8; row < rows.num_rows; row += 4) {
      const OutputRow place(p, rows, kv_head, row);
      const auto* from =
          static_cast<const unsigned char*>(p.tensors.q.data) +
          2 * (place.token * p.tensors.q.token_stride + place.head * p.tensors.q.head_stride);
      const KeyParts parts = {from, from, p.tensors.head_dim_qk, p.tensors.head_dim_qk};
#pragma unroll 1
      for (int block = 0; block < S::Query::kBlocks; ++block) {
        copy_parts_16<2>(to + S::Query::offset(row, block * 8 + chunk), parts,
                         block * 64 + chunk * 8, p.tensors.vectorized);
      }
    }
    finish_row_copies(full);
  }

  const AttentionParams& p_;
  const MlaSmem<S> smem_;
  const int lane_;
  uint32_t queue_word_ = 0;
  int32_t queue_begin_ = 0;
  int32_t num_tiles_ = 0;
  uint32_t word_ = 0;        // this lane's word of the current tile or segment
  int32_t tile_ = 0;         // number of the next tile in the queue
  int32_t head_ = 0;         // head of the next record, counted from the first one of its tile
  int32_t num_heads_ = 0;    // kv heads of the current tile
  int32_t num_records_ = 0;  // records loaded so far
  bool has_end_ = false;     // whether the last record marks the end
  uint32_t num_loaded_ = 0;  // records whose queries are loaded
};

}  // namespace flashplan::device
