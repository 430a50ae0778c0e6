// SPDX-License-Identifier: Apache-2.0
// The warps of the sm90 producer that load queries. One of them also loads the records of work
// tiles.
#pragma once

#include "kernels/device/sm90/producer_warp.h"
#include "kernels/device/sm90/queue_records.h"
#include "kernels/device/sm90/widening.h"

namespace flashplan::device {

template <typename S>
class Sm90QueryLoader : Sm90ProducerWarp<S> {
  using Base = Sm90ProducerWarp<S>;

 public:
  using Base::Base;

  /// Starts to load QueueStart: the bounds of the queue, and the records of its first tiles. Each
  /// lane of the warps that load keys, values and records gets one word of it.
  static FLASHPLAN_DEVICE uint32_t request_queue(const AttentionParams& p) {
    const int thread = static_cast<int>(threadIdx.x) - 128 * S::kWarpgroups;
    const int lane = thread % 32;
    uint32_t word = 0;
    if (thread >= 0 && thread < 3 * 32 && lane < RecordWords::kQueue) {
      const auto* words = reinterpret_cast<const uint32_t*>(p.schedule.starts + blockIdx.x);
      word = load_global_4(words + lane);
    }
    return word;
  }

  /// `queue_word`: this lane's word of QueueStart, from request_queue().
  FLASHPLAN_DEVICE void run(uint32_t queue_word) {
    if (warp_ == 2) begin_queue(queue_word);
    load_queries();
  }

 private:
  using Base::copy_rows;
  using Base::finish_copies;
  using Base::lane_;
  using Base::maps_;
  using Base::p_;
  using Base::release_context;
  using Base::smem_;
  using Base::wait_context;
  using Base::warp_;

  static constexpr int kRecordsAhead = 3;
  static_assert(kRecordsAhead < S::kContexts - 1);
  static constexpr int kFirstRecords = RecordWords::kFirstRecords;
  static constexpr int kTileWords = RecordWords::kTile;
  static constexpr int kSegmentWords = RecordWords::kSegment;

  /// Takes the bounds of the queue, and stores the records of its first tiles in shared memory.
  /// `word`: this lane's word of QueueStart.
  FLASHPLAN_DEVICE void begin_queue(uint32_t word) {
    constexpr int kPrepared = RecordWords::kPrepared;
    queue_begin_ = static_cast<int32_t>(__shfl_sync(0xffffffffU, word, RecordWords::kBegin));
    num_tiles_ =
        static_cast<int32_t>(__shfl_sync(0xffffffffU, word, RecordWords::kEnd)) - queue_begin_;
    const int index = lane_ - RecordWords::kTiles;
    if (index >= 0 && index < RecordWords::kAllFirst) {
      const RecordPlace to = first_record_place(index);
      store_shared_4(smem_.context(to.record) + to.word * 4, word);
    }
    if (S::kTakesPrepared && lane_ >= kPrepared && lane_ < kPrepared + kFirstRecords) {
      store_shared_4(smem_.first_prepared(lane_ - kPrepared), word);
    }
  }
  /// Completes the next record, whose words are loaded, and arrives at its barrier.
  FLASHPLAN_DEVICE void finish_context() {
    const int slot = num_contexts_ % S::kContexts;
    __syncwarp();
    if (lane_ == 0) {
      Sm90Context& context = smem_.memory.contexts[slot];
      context.is_end = num_contexts_ >= num_tiles_;
      if (!context.is_end) context.finish(p_, S::kTileKv);
      mbarrier_arrive(smem_.context_full(slot));
      if (!context.is_end && context.tile.merge >= 0) {
        prefetch_l2(p_.schedule.merges + context.tile.merge);
        prefetch_l2(p_.schedule.arrivals + context.tile.merge);
      }
    }
    ++num_contexts_;
  }
  /// Loads the next record, if begin_queue() has not, and finishes it. After the last tile comes
  /// one more record, which marks the end.
  FLASHPLAN_DEVICE void load_context() {
    const int32_t i = num_contexts_;
    const int slot = i % S::kContexts;
    const uint32_t to = smem_.context(slot);
    mbarrier_wait(smem_.context_empty(slot), (i / S::kContexts - 1) & 1);
    if (i >= kFirstRecords && i < num_tiles_) {
      const auto* tile = reinterpret_cast<const uint32_t*>(p_.schedule.tiles + queue_begin_ + i);
      const uint32_t word = lane_ < kTileWords ? tile[lane_] : 0;
      if (lane_ < kTileWords) store_shared_4(to + lane_ * 4, word);
      const auto index = static_cast<int32_t>(__shfl_sync(0xffffffffU, word, 0));
      const auto* segment = reinterpret_cast<const uint32_t*>(p_.schedule.segments + index);
      if (S::kTakesPrepared && p_.prepared.states != nullptr) {
        // One load instruction brings the segment and the number of its first prepared tile, so
        // that they arrive together.
        const auto* first_tile = reinterpret_cast<const uint32_t*>(p_.prepared.first_tiles + index);
        const bool is_segment = lane_ < kSegmentWords;
        const uint32_t place =
            is_segment ? to + sizeof(WorkTile) + lane_ * 4 : smem_.first_prepared(slot);
        if (lane_ <= kSegmentWords) {
          store_shared_4(place, *(is_segment ? segment + lane_ : first_tile));
        }
      } else {
        if (lane_ < kSegmentWords) {
          store_shared_4(to + sizeof(WorkTile) + lane_ * 4, segment[lane_]);
        }
      }
      if (lane_ == 0 && i + kRecordsAhead < num_tiles_) {
        prefetch_l2(p_.schedule.tiles + queue_begin_ + i + kRecordsAhead);
      }
    }
    finish_context();
  }

  /// Two warps load queries. If a tensor map describes them, one warp requests all rows of a tile
  /// by boxes; otherwise each warp copies half of the rows. Warp 2 also loads the records of tiles,
  /// and is therefore later, so the boxes and the first half are left to warp 3. Queries must be
  /// requested before the keys: behind the keys they would arrive thousands of clocks later.
  FLASHPLAN_DEVICE void load_queries() {
    const bool brings_records = warp_ == 2;
    int32_t place = 0;  // how many parts of query buffers earlier queries have taken
    for (int32_t i = 0;; ++i) {
      // Records that are not in QueueStart are loaded after the first queries, so that these
      // queries need not wait for them.
      const int32_t ahead = i == 0 ? kFirstRecords - 1 : i - 1 + kRecordsAhead;
      while (brings_records && num_contexts_ <= min(num_tiles_, ahead)) load_context();
      const Sm90Context& context = wait_context(i);
      if (context.is_end) return;
      if (context.has_steps()) {
        const RowBlock block = context.block();
        const int32_t heads_end = context.tile.kv_head + context.tile.num_kv_heads;
        const bool is_shared = block.rows.num_rows > 64;
        for (int32_t head = context.tile.kv_head; head < heads_end; ++head) {
          while (is_shared && place % S::kQParts != 0) {
            wait_query_part(place);
            if (lane_ == 0) mbarrier_arrive(smem_.q_loaded(place % S::kQBarriers));
            ++place;
          }
          load_queries_of(block.rows, head, place, !brings_records);
          place += is_shared ? S::kQParts : 1;
        }
      }
      release_context(i);
    }
  }

  /// Waits until the consumers have freed a part of the memory of queries.
  FLASHPLAN_DEVICE void wait_query_part(int32_t place) const {
    mbarrier_wait(smem_.q_empty(place % S::kQBarriers), (place / S::kQBarriers - 1) & 1);
  }

  FLASHPLAN_DEVICE void load_queries_of(const PackedRows& rows, int32_t head, int32_t place,
                                        bool is_first) const {
    const uint32_t full = smem_.q_loaded(place % S::kQBarriers);
    const uint32_t to = smem_.queries(place);
    const bool is_shared = rows.num_rows > 64;
    wait_query_part(place);
    // The consumers wait for the first part alone, so it is the last one to be announced.
    for (int part = 1; is_shared && part < S::kQParts; ++part) {
      wait_query_part(place + part);
      if (lane_ == 0) mbarrier_arrive(smem_.q_loaded((place + part) % S::kQBarriers));
    }
    if (is_shared ? maps_.has_q : maps_.has_q_tokens && has_whole_tokens(rows)) {
      if (!is_first) {
        if (lane_ == 0) mbarrier_arrive(full);
      } else if (is_shared) {
        load_tile_by_map(to, full, rows, head);
      } else {
        load_tokens_by_map(to, full, rows, head);
      }
      return;
    }
    const int element_bytes = is_narrow() ? 1 : 2;
    // Warps multiply 16 rows, so rows past the last one are filled, too: with copies of the last
    // row, which are finite if the queries are.
    const int begin = is_first ? 0 : S::kTileQ / 2;
    const int end =
        min(begin + S::kTileQ / 2, is_shared ? S::kTileQ : (rows.num_rows + 15) / 16 * 16);
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      const int row = min(first + lane_, rows.num_rows - 1);
      const auto* from =
          static_cast<const unsigned char*>(p_.tensors.q.data) +
          element_bytes * (rows.token(row, p_.schedule.group_size) * p_.tensors.q.token_stride +
                           static_cast<uint32_t>(rows.qo_head(head, row, p_.schedule.group_size)) *
                               p_.tensors.q.head_stride);
      copy_rows(to + first * 128, 1024, S::Query::kBlockBytes, from, min(end - first, 32), 32,
                is_narrow() ? (S::Query::kBlocks + 1) / 2 : S::Query::kBlocks,
                element_bytes * p_.tensors.head_dim_qk);
    }
    if constexpr (S::kTakesNarrowQueries) {
      if (is_narrow()) widen_rows(to, begin, end);
    }
    finish_copies(full);
  }

  /// Whether queries have 8 bits in memory.
  FLASHPLAN_DEVICE bool is_narrow() const {
    return S::kTakesNarrowQueries && p_.tensors.q_dtype != S::kQuery;
  }
  /// Widens rows that this warp has copied, each by one lane. A row's 8-bit dims lie where the 16
  /// bits of its first half of dims will be, so the last dims are widened first.
  FLASHPLAN_DEVICE void widen_rows(uint32_t tile, int begin, int end) const {
    cp_async_wait_all();
    __syncwarp();
#pragma unroll 1
    for (int row = begin + lane_; row < end; row += 32) {
#pragma unroll 1
      for (int chunk = S::kHeadDimQk / 16 - 1; chunk >= 0; --chunk) {
        const uint4 narrow = load_shared_16(tile + S::Query::offset(row, chunk));
        const uint32_t wide = tile + S::Query::offset(row, 2 * chunk);
        Sm90Widening<S>::template store_8<S::kQ>(wide, narrow.x, narrow.y);
        Sm90Widening<S>::template store_8<S::kQ>(wide ^ 16, narrow.z, narrow.w);
      }
    }
    __syncwarp();
  }

  /// The number of tokens of a tile of few rows, with those that pad it to whole groups of 16 rows.
  FLASHPLAN_DEVICE int num_padded_tokens(const PackedRows& rows) const {
    const Divisor& group_size = p_.schedule.group_size;
    const int num_rows = (rows.num_rows + 15) / 16 * 16;
    return static_cast<int>(
        quotient(static_cast<uint32_t>(num_rows + group_size.value - 1), group_size));
  }
  /// Whether a tensor map can load a tile of few rows, in boxes of whole tokens: the tile has all
  /// heads of each of its tokens and, with the tokens that pad it, at most the 64 rows of a part.
  FLASHPLAN_DEVICE bool has_whole_tokens(const PackedRows& rows) const {
    const Divisor& group_size = p_.schedule.group_size;
    const int32_t first = rows.query(0, group_size);
    const int32_t last = rows.query(rows.num_rows - 1, group_size);
    return rows.row_begin == first * group_size.value &&
           rows.num_rows == (last - first + 1) * group_size.value &&
           num_padded_tokens(rows) * group_size.value <= 64;
  }
  FLASHPLAN_DEVICE void load_tile_by_map(uint32_t to, uint32_t full, const PackedRows& rows,
                                         int32_t head) const {
    if (lane_ != 0) return;
    mbarrier_arrive_expect(full, S::Query::bytes(S::kTileQ));
#pragma unroll
    for (int block = 0; block < S::Query::kBlocks; ++block) {
      tma_load_3d(to + block * S::Query::kBlockBytes, &maps_.q, full, block * 64,
                  head * p_.schedule.group_size.value,
                  static_cast<int>(rows.token(0, p_.schedule.group_size)));
    }
  }
  /// Loads a tile of few rows, a box for each token. Other rows that warps multiply become zeros:
  /// their boxes are those of token -1, which lies outside the map.
  FLASHPLAN_DEVICE void load_tokens_by_map(uint32_t to, uint32_t full, const PackedRows& rows,
                                           int32_t head) const {
    const int group = p_.schedule.group_size.value;
    const int num_tokens = num_padded_tokens(rows);
    const auto first = static_cast<int>(rows.token(0, p_.schedule.group_size));
    if (lane_ == 0) mbarrier_arrive_expect(full, S::Query::bytes(num_tokens * group));
    __syncwarp();
#pragma unroll 1
    for (int i = lane_; i < num_tokens; i += 32) {
      const int token = i * group < rows.num_rows ? first + i : -1;
#pragma unroll
      for (int block = 0; block < S::Query::kBlocks; ++block) {
        tma_load_3d(to + i * group * 128 + block * S::Query::kBlockBytes, &maps_.q_tokens, full,
                    block * 64, head * group, token);
      }
    }
  }

  int32_t queue_begin_ = 0;
  int32_t num_tiles_ = 0;
  // How many records of work tiles are in smem_.context() so far, with the one that ends the queue.
  int32_t num_contexts_ = 0;
};

}  // namespace flashplan::device
