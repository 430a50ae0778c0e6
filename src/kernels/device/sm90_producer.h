// SPDX-License-Identifier: Apache-2.0
// The producer of the sm90 family: loads the records of work tiles, queries, keys and values into
// shared memory, ahead of the consumers.
#pragma once

#include "kernels/device/hopper.h"
#include "kernels/device/sm90_shape.h"

namespace flashplan::device {

template <typename S>
class Sm90Producer {
 public:
  FLASHPLAN_DEVICE Sm90Producer(const AttentionParams& p, unsigned char* smem)
      : p_(p),
        maps_(p.maps),
        smem_(smem),
        base_(shared_address(smem)),
        warp_(__shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// Starts to load the begin of the queue: one word for each thread of the warp that loads
  /// records.
  static FLASHPLAN_DEVICE uint32_t request_queue(const AttentionParams& p) {
    constexpr int kFirst = 128 * S::kWarpgroups + 64;
    const int lane = static_cast<int>(threadIdx.x) - kFirst;
    uint32_t word = 0;
    if (lane >= 0 && lane < kQueueWords) {
      const auto* words = reinterpret_cast<const uint32_t*>(p.schedule.starts + blockIdx.x);
      asm volatile("ld.global.u32 %0, [%1];\n" : "=r"(word) : "l"(words + lane));
    }
    return word;
  }

  /// `queue_word`: what request_queue() returned.
  FLASHPLAN_DEVICE void run(uint32_t queue_word) {
    if (warp_ == 0) {
      if constexpr (!S::kGathers) load_steps<true, S::kKvWarps == 1>();
    } else if (warp_ == 1) {
      if constexpr (!S::kGathers && S::kKvWarps == 2) load_steps<false, true>();
    } else if (!S::Variant::kIsBuiltIn) {  // one copy of the code
      if (warp_ == 2) begin_queue(queue_word);
      load_queries(warp_ == 2);
    } else if (warp_ == 2) {
      begin_queue(queue_word);
      load_queries(true);
    } else {
      load_queries(false);
    }
  }

 private:
  FLASHPLAN_DEVICE uint32_t barrier(int first, int index) const {
    return base_ + first + index * 8;
  }

  static constexpr int kRecordsAhead = 3;
  static_assert(kRecordsAhead < S::kContexts - 1);
  static constexpr int kQueueWords = 28;
  static_assert(sizeof(QueueStart) == kQueueWords * 4);

  /// Takes the bounds of the queue and the records of its first two tiles.
  FLASHPLAN_DEVICE void begin_queue(uint32_t word) {
    queue_begin_ = static_cast<int32_t>(__shfl_sync(0xffffffffU, word, 0));
    num_tiles_ = static_cast<int32_t>(__shfl_sync(0xffffffffU, word, 1)) - queue_begin_;
    const int index = lane_ - 4;
    if (index >= 0 && index < 24) {
      const int record = index < 16 ? index / 8 : (index - 16) / 4;
      const int place = index < 16 ? index % 8 : 8 + index % 4;
      store_shared_4(base_ + S::kContext + record * sizeof(Sm90Context) + place * 4, word);
    }
    finish_context();
    finish_context();
  }
  /// Finishes the record that was just loaded, and arrives at its barrier.
  FLASHPLAN_DEVICE void finish_context() {
    const int slot = num_contexts_ % S::kContexts;
    __syncwarp();
    if (lane_ == 0) {
      Sm90Context& context = reinterpret_cast<Sm90Context*>(smem_ + S::kContext)[slot];
      context.is_end = num_contexts_ >= num_tiles_;
      if (!context.is_end) context.finish(p_, S::kTileKv);
      mbarrier_arrive(barrier(S::kContextFull, slot));
      if (!context.is_end && context.tile.merge >= 0) {
        prefetch_l2(p_.schedule.merges + context.tile.merge);
        prefetch_l2(p_.schedule.arrivals + kArrivalsPerMerge * context.tile.merge);
      }
    }
    ++num_contexts_;
  }
  /// Loads the next record. After the last tile comes one more record, which marks the end.
  FLASHPLAN_DEVICE void load_context() {
    const int32_t i = num_contexts_;
    const int slot = i % S::kContexts;
    const uint32_t to = base_ + S::kContext + slot * sizeof(Sm90Context);
    mbarrier_wait(barrier(S::kContextEmpty, slot), (i / S::kContexts - 1) & 1);
    if (i < num_tiles_) {
      const auto* tile = reinterpret_cast<const uint32_t*>(p_.schedule.tiles + queue_begin_ + i);
      const uint32_t word = lane_ < 8 ? tile[lane_] : 0;
      if (lane_ < 8) store_shared_4(to + lane_ * 4, word);
      const auto index = static_cast<int32_t>(__shfl_sync(0xffffffffU, word, 0));
      const auto* segment = reinterpret_cast<const uint32_t*>(p_.schedule.segments + index);
      if (lane_ < 4) store_shared_4(to + 32 + lane_ * 4, segment[lane_]);
      if (lane_ == 0 && i + kRecordsAhead < num_tiles_) {
        prefetch_l2(p_.schedule.tiles + queue_begin_ + i + kRecordsAhead);
      }
    }
    finish_context();
  }

  FLASHPLAN_DEVICE const Sm90Context& wait_context(int32_t i) const {
    const int slot = i % S::kContexts;
    mbarrier_wait(barrier(S::kContextFull, slot), i / S::kContexts & 1);
    return reinterpret_cast<const Sm90Context*>(smem_ + S::kContext)[slot];
  }
  FLASHPLAN_DEVICE void release_context(int32_t i) const {
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(barrier(S::kContextEmpty, i % S::kContexts));
  }

  /// Keys [key, key + kTileKv) of a work tile, up to the end of its keys, for one head.
  struct Step {
    int32_t tile;  // its number in the queue
    int32_t head;
    int32_t key;
  };

  FLASHPLAN_DEVICE const Sm90Context& context_of(const Step& step) const {
    return reinterpret_cast<const Sm90Context*>(smem_ + S::kContext)[step.tile % S::kContexts];
  }
  FLASHPLAN_DEVICE int32_t num_keys(const Step& step) const {
    return max(min(S::kTileKv, context_of(step).tile.kv_end - step.key), 0);
  }

  /// Fills slots in the order in which the consumers use them: the keys of a step, then the values
  /// of the step before it. With two warps, one loads keys and the other one values. Page ids are
  /// requested one step ahead, because on a busy GPU they take as long to arrive as the keys.
  template <bool kKeys, bool kValues>
  FLASHPLAN_DEVICE void load_steps() {
    Step last = {};   // its keys are requested, its values are not
    Step ahead = {};  // its page ids are requested
    int32_t last_page_id = 0;
    bool has_last = false;
    bool has_ahead = false;
    int32_t position = 0;  // twice the number of steps whose keys are requested
    for (int32_t i = 0;; ++i) {
      const WorkTile& tile = wait_context(i).tile;
      Step step = {i, tile.kv_head, tile.kv_begin};
      bool has_step = context_of(step).has_steps();
      // Before a tile without keys, as at the end of the queue, the consumers finish the tile
      // before it, so they wait for its last values.
      const bool finishes = !has_step;
      do {
        const int32_t page_id = wait_page_id();
        if (has_step) request_page_id(step);
        if (has_ahead) {
          if constexpr (kKeys) load<true>(position - (has_last ? 1 : 0), ahead, page_id);
          if constexpr (kKeys && kValues) {
            if (has_last) load<false>(position, last, last_page_id);
            if (finishes) load<false>(position + 1, ahead, page_id);
          } else if constexpr (kValues) {
            load<false>(position + (finishes ? 1 : 2), ahead, page_id);
          }
          position += 2;
        }
        // The record of the tile before was needed until its last step was requested.
        if (i > 0 && step.key == tile.kv_begin && step.head == tile.kv_head) release_context(i - 1);
        if constexpr (kKeys && kValues) {
          last = ahead;
          last_page_id = page_id;
        }
        has_last = has_ahead && !finishes;
        ahead = step;
        has_ahead = has_step;
        step.key += S::kTileKv;
        if (step.key >= tile.kv_end) {
          step.key = tile.kv_begin;
          has_step = has_step && ++step.head < tile.kv_head + tile.num_kv_heads;
        }
      } while (has_step);
      if (finishes && context_of(step).is_end) return;
    }
  }

  FLASHPLAN_DEVICE bool is_paged() const { return p_.tensors.pages.ids != nullptr; }

  /// Requests the page id of this lane's box of a step. cp.async copies it to shared memory: as the
  /// target of a load that has not arrived, a register would be spilled to local memory, and the
  /// spill would wait for the load.
  FLASHPLAN_DEVICE void request_page_id(const Step& step) const {
    const int32_t row = lane_ * maps_.box_rows;
    if (!is_paged() || !maps_.has_kv || row >= num_keys(step)) return;
    const auto key = static_cast<uint32_t>(step.key + row);
    const int32_t* ids = page_ids(p_.tensors.pages, context_of(step).segment.kv_row);
    cp_async_4(page_id_address(), ids + quotient(key, p_.tensors.pages.page_size));
  }
  FLASHPLAN_DEVICE int32_t wait_page_id() const {
    if (!is_paged()) return 0;
    asm volatile("cp.async.wait_all;\n" ::: "memory");
    return static_cast<int32_t>(load_shared_4(page_id_address()));
  }
  FLASHPLAN_DEVICE uint32_t page_id_address() const {
    return base_ + S::kPageIds + (warp_ * 32 + lane_) * 4;
  }

  /// Fills a slot with keys or values. `position` counts the slots filled since the queue began.
  template <bool kIsKey>
  FLASHPLAN_DEVICE void load(int32_t position, const Step& step, int32_t page_id) {
    const int slot = position % S::kSlots;
    mbarrier_wait(barrier(S::kSlotEmpty, slot), (position / S::kSlots & 1) ^ 1);
    const uint32_t to = base_ + S::kFirstSlot + slot * S::kSlotBytes;
    uint32_t full = barrier(S::kSlotFull, slot);
    // Keys that are to be rotated first. `position` is twice the number of their step, or 1 less.
    if (S::kRotates && kIsKey) full = barrier(S::kKeyLoaded, (position + 1) / 2 % S::kSlots);
    const int32_t token = context_of(step).segment.kv_row + step.key;  // of ragged tensors
    if (!maps_.has_kv || (!is_paged() && token + S::kTileKv > maps_.num_kv_tokens)) {
      gather<kIsKey>(to, step);
      finish_copies(full);
      return;
    }
    const int32_t num_rows = is_paged() ? num_keys(step) : S::kTileKv;
    const bool has_box = lane_ * maps_.box_rows < num_rows;
    const int box_bytes = maps_.box_rows * (kIsKey ? S::kKeyBytes : S::kValueBytes) / S::kTileKv;
    // Values past the last key must be zeros, since 0 * NaN is NaN. They are overwritten before the
    // consumers see the slot. Keys need no zeros: logits past the last key are masked.
    const bool hides = !kIsKey && num_keys(step) < S::kTileKv;
    const uint32_t loaded = hides ? barrier(S::kTailFull, warp_) : full;
    const int num_boxes = __popc(__ballot_sync(0xffffffffU, has_box));
    if (lane_ == 0) mbarrier_arrive_expect(loaded, num_boxes * box_bytes);
    __syncwarp();
    if (has_box) {
      const auto first = static_cast<uint32_t>(step.key + lane_ * maps_.box_rows);
      const uint32_t page = quotient(first, p_.tensors.pages.page_size);
      const int in_page = static_cast<int>(first - page * p_.tensors.pages.page_size.value);
      const int slabs = kIsKey ? maps_.k_slabs_per_page : maps_.v_slabs_per_page;
      constexpr int kBlocks = kIsKey ? S::Key::kBlocks : S::Value::kBlocks;
#pragma unroll 1
      for (int block = 0; block < (maps_.has_all_blocks ? 1 : kBlocks); ++block) {
        tma_load_5d(to + lane_ * box_bytes + block * 1024, kIsKey ? &maps_.k : &maps_.v, loaded,
                    block * 64, is_paged() ? 0 : token + lane_ * maps_.box_rows, 0,
                    is_paged() ? in_page / 8 : 0, page_id * slabs + step.head);
      }
    }
    if (!hides) return;
    mbarrier_wait(loaded, tail_parity_);
    tail_parity_ ^= 1;
#pragma unroll 1
    for (int row = num_keys(step) + lane_ / 8; row < S::kTileKv; row += 4) {
#pragma unroll 1
      for (int block = 0; block < S::Value::kBlocks; ++block) {
        store_shared_16(to + row / 8 * S::Value::kGroupBytes + block * S::Value::kBlockBytes +
                            row % 8 * 128 + lane_ % 8 * 16,
                        {0, 0, 0, 0});
      }
    }
    finish_copies(full);
  }

  /// Makes this warp's copies visible to wgmma, and arrives at `full`.
  FLASHPLAN_DEVICE void finish_copies(uint32_t full) const {
    asm volatile("cp.async.wait_all;\n" ::: "memory");
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(full);
  }

  /// Copies keys or values row by row, and writes zeros past the last key.
  template <bool kIsKey>
  FLASHPLAN_DEVICE void gather(uint32_t to, const Step& step) {
    const KvView& view = kIsKey ? p_.tensors.k : p_.tensors.v;
    const int head_dim = kIsKey ? p_.tensors.head_dim_qk : p_.tensors.head_dim_vo;
    constexpr int kBlocks = kIsKey ? S::Key::kBlocks : S::Value::kBlocks;
    const int32_t kv_row = context_of(step).segment.kv_row;
    const int32_t count = num_keys(step);
#pragma unroll 1
    for (int first = 0; first < S::kTileKv; first += 32) {
      const int32_t own = step.key + min(first + lane_, count - 1);
      int64_t page = 0;
      int64_t in_page = count > 0 ? kv_row + own : 0;
      if (is_paged() && count > 0) {
        const uint32_t number = quotient(static_cast<uint32_t>(own), p_.tensors.pages.page_size);
        page = page_ids(p_.tensors.pages, kv_row)[number];
        in_page = own - static_cast<int32_t>(number) * p_.tensors.pages.page_size.value;
      }
      const auto* row = static_cast<const unsigned char*>(view.data) +
                        2 * (page * view.page_stride + in_page * view.token_stride +
                             step.head * view.head_stride);
      copy_rows(to + first / 8 * kBlocks * 1024, kBlocks * 1024, 1024, row,
                min(S::kTileKv - first, 32), count - first, kBlocks, head_dim);
    }
  }

  /// Copies up to 32 rows of `num_blocks` blocks of 64 dims; lane r gives the address of row r in
  /// `row`. Writes zeros from row `num_valid` and from dim `num_dims` on.
  FLASHPLAN_DEVICE void copy_rows(uint32_t tile, int group_bytes, int block_bytes,
                                  const unsigned char* row, int num_rows, int num_valid,
                                  int num_blocks, int num_dims) const {
    const int chunk = lane_ % 8;
#pragma unroll 1
    for (int r = lane_ / 8; r < num_rows; r += 4) {
      const auto* from = shuffled_pointer(row, r);
      uint32_t to = tile + r / 8 * group_bytes + r % 8 * 128 + ((chunk ^ r) % 8 << 4);
      const int valid = r < num_valid ? num_dims : 0;
#pragma unroll 1
      for (int dim = chunk * 8; dim < num_blocks * 64; dim += 64, to += block_bytes) {
        copy_16(to, from + 2 * dim, valid - dim, row);
      }
    }
  }

  /// Copies `num_valid` of 8 elements, and writes zeros after them. `any` is a readable address,
  /// for where there is nothing to copy.
  FLASHPLAN_DEVICE void copy_16(uint32_t to, const unsigned char* from, int num_valid,
                                const unsigned char* any) const {
    if (p_.tensors.vectorized) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to),
                   "l"(num_valid > 0 ? from : any), "r"(num_valid > 0 ? 16 : 0)
                   : "memory");
    } else {
      uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < num_valid) {
          const uint32_t element = reinterpret_cast<const uint16_t*>(from)[i];
          words[i / 2] |= element << (i % 2 * 16);
        }
      }
      store_shared_16(to, {words[0], words[1], words[2], words[3]});
    }
  }

  /// Loads queries by two warps: one of them copies all rows of a tile at once, or each warp copies
  /// half of the rows. One warp also loads the records of tiles, and is therefore later; the other
  /// one has the first rows. Queries must be requested before the keys: behind the keys they would
  /// arrive thousands of clocks later.
  FLASHPLAN_DEVICE void load_queries(bool brings_records) {
    int32_t place = 0;  // see query_offset()
    for (int32_t i = 0;; ++i) {
      const Sm90Context& context = wait_context(i);
      if (context.is_end) return;
      if (context.has_steps()) {
        const RowBlock block = context.block();
        const int32_t heads_end = context.tile.kv_head + context.tile.num_kv_heads;
        const bool is_shared = block.rows.num_rows > 64;
        for (int32_t head = context.tile.kv_head; head < heads_end; ++head) {
          while (is_shared && place % S::kQParts != 0) {
            wait_query_part(place);
            if (lane_ == 0) mbarrier_arrive(barrier(S::kQLoaded, place % S::kQBarriers));
            ++place;
          }
          load_queries_of(block.rows, head, place, !brings_records);
          place += is_shared ? S::kQParts : 1;
        }
      }
      release_context(i);
      while (brings_records && num_contexts_ <= min(num_tiles_, i + kRecordsAhead)) load_context();
    }
  }

  /// Waits until the consumers have freed a part of the memory of queries.
  FLASHPLAN_DEVICE void wait_query_part(int32_t place) const {
    mbarrier_wait(barrier(S::kQEmpty, place % S::kQBarriers), (place / S::kQBarriers - 1) & 1);
  }

  FLASHPLAN_DEVICE void load_queries_of(const PackedRows& rows, int32_t head, int32_t place,
                                        bool is_first) const {
    const uint32_t full = barrier(S::kQLoaded, place % S::kQBarriers);
    const uint32_t to = base_ + S::query_offset(place);
    const bool is_shared = rows.num_rows > 64;
    wait_query_part(place);
    // The consumers wait for the first part alone, so it is the last one to be announced.
    for (int part = 1; is_shared && part < S::kQParts; ++part) {
      wait_query_part(place + part);
      if (lane_ == 0) mbarrier_arrive(barrier(S::kQLoaded, (place + part) % S::kQBarriers));
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
    // All rows of the warps that multiply are filled, those past the last one with copies of it:
    // they are finite if the queries are.
    const int begin = is_first ? 0 : S::kTileQ / 2;
    const int end =
        min(begin + S::kTileQ / 2, is_shared ? S::kTileQ : (rows.num_rows + 15) / 16 * 16);
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      const int row = min(first + lane_, rows.num_rows - 1);
      const auto* from =
          static_cast<const unsigned char*>(p_.tensors.q.data) +
          2 * (rows.token(row, p_.schedule.group_size) * p_.tensors.q.token_stride +
               static_cast<uint32_t>(rows.qo_head(head, row, p_.schedule.group_size)) *
                   p_.tensors.q.head_stride);
      copy_rows(to + first * 128, 1024, S::Query::kBlockBytes, from, min(end - first, 32), 32,
                S::Query::kBlocks, p_.tensors.head_dim_qk);
    }
    finish_copies(full);
  }

  /// The tokens of a tile of few rows, with those that pad it to all rows of its warps.
  FLASHPLAN_DEVICE int num_padded_tokens(const PackedRows& rows) const {
    const Divisor& group_size = p_.schedule.group_size;
    const int num_rows = (rows.num_rows + 15) / 16 * 16;
    return static_cast<int>(
        quotient(static_cast<uint32_t>(num_rows + group_size.value - 1), group_size));
  }
  /// Whether a tile of few rows has all heads of its tokens, and its part of the memory holds them.
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
    mbarrier_arrive_expect(full, S::kQBytes);
#pragma unroll
    for (int block = 0; block < S::Query::kBlocks; ++block) {
      tma_load_3d(to + block * S::Query::kBlockBytes, &maps_.q, full, block * 64,
                  head * p_.schedule.group_size.value,
                  static_cast<int>(rows.token(0, p_.schedule.group_size)));
    }
  }
  /// Rows of tokens that the tile does not have, as far as warps multiply them, are zeros: they
  /// come from a token that is none.
  FLASHPLAN_DEVICE void load_tokens_by_map(uint32_t to, uint32_t full, const PackedRows& rows,
                                           int32_t head) const {
    const int group = p_.schedule.group_size.value;
    const int num_tokens = num_padded_tokens(rows);
    const auto first = static_cast<int>(rows.token(0, p_.schedule.group_size));
    if (lane_ == 0) mbarrier_arrive_expect(full, num_tokens * group * S::kHeadDimQk * 2);
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

  const AttentionParams& p_;
  const TensorMaps& maps_;
  unsigned char* const smem_;
  const uint32_t base_;
  const int warp_;
  const int lane_;
  uint32_t tail_parity_ = 0;
  int32_t queue_begin_ = 0;
  int32_t num_tiles_ = 0;
  int32_t num_contexts_ = 0;  // records loaded so far
};

}  // namespace flashplan::device
