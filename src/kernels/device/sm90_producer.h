// SPDX-License-Identifier: Apache-2.0
// The producer of the sm90 family: brings work tiles, queries, keys and values to shared memory,
// ahead of the consumers.
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

  FLASHPLAN_DEVICE void run() {
    if (warp_ < 2) {
      load_keys_and_values();
    } else if (warp_ == 2) {
      load_queries(true);
    } else {
      load_queries(false);
    }
  }

 private:
  FLASHPLAN_DEVICE uint32_t barrier(int first, int index) const {
    return base_ + first + index * 8;
  }

  /// Brings the begin of the queue: its first two records in one read.
  FLASHPLAN_DEVICE void begin_queue() {
    static_assert(sizeof(QueueStart) == 28 * 4);
    const auto* words = reinterpret_cast<const uint32_t*>(p_.schedule.starts + blockIdx.x);
    const uint32_t word = lane_ < 28 ? words[lane_] : 0;
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
  /// Says that the next record is there, once it is fitted to the real length of its request.
  FLASHPLAN_DEVICE void finish_context() {
    const int slot = num_contexts_ % S::kContexts;
    __syncwarp();
    if (lane_ == 0) {
      Sm90Context& context = reinterpret_cast<Sm90Context*>(smem_ + S::kContext)[slot];
      context.is_end = num_contexts_ >= num_tiles_;
      if (p_.tensors.kv_lens != nullptr && !context.is_end) context.fit_to_length(p_, S::kTileKv);
      mbarrier_arrive(barrier(S::kContextFull, slot));
    }
    ++num_contexts_;
  }
  /// Brings the next record. One more than there are tiles says that the queue ends.
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

  /// Keys [key, key + kTileKv) of a segment and a head, of those before kv_end.
  struct Step {
    int32_t kv_row;  // of the segment
    int32_t kv_end;
    int32_t head;
    int32_t key;
  };

  /// Two warps fill slots in turn, in the order of use: keys of a step, then values of the one
  /// before it.
  FLASHPLAN_DEVICE void load_keys_and_values() {
    int32_t slot = 0;
    uint32_t parity = 1;  // of an empty slot's last phase: at first none is waited for
    bool is_own = warp_ == 0;
    Step last = {};
    bool has_last = false;
    for (int32_t i = 0;; ++i) {
      const Sm90Context& context = wait_context(i);
      const WorkTile& tile = context.tile;
      const bool is_end = context.is_end;
      Step step = {context.segment.kv_row, tile.kv_end, tile.kv_head, tile.kv_begin};
      const int32_t end = tile.kv_end;
      const int32_t heads_end = tile.kv_head + tile.num_kv_heads;
      bool has_step = !is_end && step.key < end;
      // The consumers finish what came before a tile without keys, as they do at the end.
      const bool finishes = !has_step;
      while (has_step || (finishes && has_last)) {
#pragma unroll 1
        for (int part = has_step ? 0 : 1; part < (has_last ? 2 : 1); ++part) {
          const bool is_key = part == 0;
          if (is_own) {
            load(slot, parity, is_key,
                 {is_key ? step.kv_row : last.kv_row, is_key ? step.kv_end : last.kv_end,
                  is_key ? step.head : last.head, is_key ? step.key : last.key});
          }
          if (S::kKvWarps == 2) is_own = !is_own;
          if (++slot == S::kSlots) {
            slot = 0;
            parity ^= 1;
          }
        }
        last = step;
        has_last = has_step;
        step.key += S::kTileKv;
        if (step.key >= end) {
          step.key = tile.kv_begin;
          has_step = has_step && ++step.head < heads_end;
        }
      }
      if (is_end) return;
      release_context(i);
    }
  }

  /// Fills a slot with the keys or values of a step.
  FLASHPLAN_DEVICE void load(int slot, uint32_t parity, bool is_key, const Step step) {
    const int32_t num_keys = min(S::kTileKv, step.kv_end - step.key);
    const bool is_tail = num_keys < S::kTileKv;
    const bool paged = p_.tensors.pages.ids != nullptr;
    const bool boxes =
        maps_.has_kv && (paged || step.kv_row + step.key + S::kTileKv <= maps_.num_kv_tokens);
    const int own_row = lane_ * maps_.box_rows;
    const bool has_box = own_row < (paged ? num_keys : S::kTileKv);
    // Ids are asked for before the slot is free.
    int32_t id = 0;
    const auto first = static_cast<uint32_t>(step.key + own_row);
    const uint32_t page = quotient(first, p_.tensors.pages.page_size);
    if (paged && boxes && has_box) id = page_ids(p_.tensors.pages, step.kv_row)[page];
    mbarrier_wait(barrier(S::kSlotEmpty, slot), parity);
    const uint32_t to = base_ + S::kFirstSlot + slot * S::kSlotBytes;
    const uint32_t full = barrier(S::kSlotFull, slot);
    if (!boxes) {
      gather(to, is_key, step, num_keys);
      finish_copies(full);
      return;
    }
    const void* map = is_key ? &maps_.k : &maps_.v;
    const int box_bytes = maps_.box_rows * (is_key ? S::kKeyBytes : S::kValueBytes) / S::kTileKv;
    // Values past the last key must be zeros, since their weights of 0 do not hide NaN: they are
    // overwritten before the consumers see the slot. Logits past it are masked.
    const bool hides = is_tail && !is_key;
    const uint32_t loaded = hides ? barrier(S::kTailFull, warp_) : full;
    const int num_boxes = __popc(__ballot_sync(0xffffffffU, has_box));
    if (lane_ == 0) mbarrier_arrive_expect(loaded, num_boxes * box_bytes);
    __syncwarp();
    if (has_box) {
      const int slabs = is_key ? maps_.k_slabs_per_page : maps_.v_slabs_per_page;
      const int in_page = static_cast<int>(first - page * p_.tensors.pages.page_size.value);
      tma_load_5d(to + lane_ * box_bytes, map, loaded, 0, paged ? 0 : step.kv_row + step.key, 0,
                  paged ? in_page / 8 : 0, id * slabs + step.head);
    }
    if (!hides) return;
    mbarrier_wait(loaded, tail_parity_);
    tail_parity_ ^= 1;
#pragma unroll 1
    for (int row = num_keys + lane_ / 8; row < S::kTileKv; row += 4) {
#pragma unroll
      for (int block = 0; block < S::Value::kBlocks; ++block) {
        store_shared_16(to + row / 8 * S::Value::kGroupBytes + block * S::Value::kBlockBytes +
                            row % 8 * 128 + lane_ % 8 * 16,
                        {0, 0, 0, 0});
      }
    }
    finish_copies(full);
  }

  /// Makes this warp's copies visible to the products, and arrives at `full`.
  FLASHPLAN_DEVICE void finish_copies(uint32_t full) const {
    asm volatile("cp.async.wait_all;\n" ::: "memory");
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(full);
  }

  /// Copies keys or values row by row; zeros past the last key.
  FLASHPLAN_DEVICE void gather(uint32_t to, bool is_key, const Step& step, int32_t num_keys) {
    const KvView& view = is_key ? p_.tensors.k : p_.tensors.v;
    const int head_dim = is_key ? p_.tensors.head_dim_qk : p_.tensors.head_dim_vo;
#pragma unroll 1
    for (int first = 0; first < S::kTileKv; first += 32) {
      const int32_t own = step.key + min(first + lane_, num_keys - 1);
      int64_t page = 0;
      int64_t in_page = step.kv_row + own;
      if (p_.tensors.pages.ids != nullptr) {
        const uint32_t number = quotient(static_cast<uint32_t>(own), p_.tensors.pages.page_size);
        page = page_ids(p_.tensors.pages, step.kv_row)[number];
        in_page = own - static_cast<int32_t>(number) * p_.tensors.pages.page_size.value;
      }
      const auto* row = static_cast<const unsigned char*>(view.data) +
                        2 * (page * view.page_stride + in_page * view.token_stride +
                             step.head * view.head_stride);
      const int num_blocks = is_key ? S::Key::kBlocks : S::Value::kBlocks;
      copy_rows(to + first / 8 * num_blocks * 1024, num_blocks * 1024, 1024, row,
                min(S::kTileKv - first, 32), num_keys - first, num_blocks, head_dim);
    }
  }

  /// Copies up to 32 rows of `num_blocks` blocks of 64 dims, of which lane r knows row r; zeros
  /// from row `num_valid` and from dim `num_dims` on.
  FLASHPLAN_DEVICE void copy_rows(uint32_t tile, int group_bytes, int block_bytes,
                                  const unsigned char* row, int num_rows, int num_valid,
                                  int num_blocks, int num_dims) const {
    const int chunk = lane_ % 8;
#pragma unroll 2
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

  /// Copies 8 elements of which `num_valid` are there; zeros after them. `any` is readable.
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

  /// Brings queries: all rows of a tile by one copy, or 64 rows by each of two warps. The first
  /// warp also brings the records of tiles.
  FLASHPLAN_DEVICE void load_queries(bool is_first) {
    if (is_first) begin_queue();
    int32_t index = 0;
    for (int32_t i = 0;; ++i) {
      while (is_first && num_contexts_ <= min(num_tiles_, i + 2)) load_context();
      const Sm90Context& context = wait_context(i);
      if (context.is_end) return;
      if (context.tile.kv_begin < context.tile.kv_end) {
        RowBlock block;
        block.assign(p_, context.tile, context.segment);
        const int32_t heads_end = context.tile.kv_head + context.tile.num_kv_heads;
        for (int32_t head = context.tile.kv_head; head < heads_end; ++head, ++index) {
          load_queries_of(block.rows, head, index, is_first);
        }
      }
      release_context(i);
    }
  }

  FLASHPLAN_DEVICE void load_queries_of(const PackedRows& rows, int32_t head, int32_t index,
                                        bool is_first) const {
    const int buffer = index % S::kQBuffers;
    const uint32_t full = barrier(S::kQFull, buffer);
    const uint32_t to = base_ + S::kQuery + buffer * S::kQBytes;
    mbarrier_wait(barrier(S::kQEmpty, buffer), (index / S::kQBuffers - 1) & 1);
    if (maps_.has_q) {
      if (lane_ == 0) {
        if (is_first) {
          mbarrier_arrive_expect(full, S::kQBytes);
          tma_load_4d(to, &maps_.q, full, 0, head * p_.schedule.group_size.value,
                      static_cast<int>(rows.token(0, p_.schedule.group_size)), 0);
        } else {
          mbarrier_arrive(full);
        }
      }
      return;
    }
    const int first_row = is_first ? 0 : S::kTileQ / 2;
#pragma unroll 1
    for (int first = first_row; first < first_row + S::kTileQ / 2; first += 32) {
      const int row = min(first + lane_, rows.num_rows - 1);
      const auto* from =
          static_cast<const unsigned char*>(p_.tensors.q.data) +
          2 * (rows.token(row, p_.schedule.group_size) * p_.tensors.q.token_stride +
               static_cast<uint32_t>(rows.qo_head(head, row, p_.schedule.group_size)) *
                   p_.tensors.q.head_stride);
      copy_rows(to + first * 128, 1024, S::Query::kBlockBytes, from, 32, 32, S::Query::kBlocks,
                p_.tensors.head_dim_qk);
    }
    finish_copies(full);
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
  int32_t num_contexts_ = 0;  // brought so far
};

}  // namespace flashplan::device
