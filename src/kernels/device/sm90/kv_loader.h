// SPDX-License-Identifier: Apache-2.0
// The warps of the sm90 producer that load keys and values: by boxes of tensor maps or, where no
// map describes the rows, row by row.
#pragma once

#include "kernels/device/key_tail.h"
#include "kernels/device/sm90/producer_warp.h"

namespace flashplan::device {

/// Fills a ring of `kNumSlots` slots with keys and values.
template <typename S, int kNumSlots>
class Sm90KvLoader : Sm90ProducerWarp<S> {
  using Base = Sm90ProducerWarp<S>;

 public:
  using Base::Base;

  /// Fills slots: one warp fills those of keys, another one those of values. Both run the same copy
  /// of the code, because a second copy would have to be fetched from memory, too. If keys and
  /// values share a ring, slots have the order in which the consumers use them: the keys of a step,
  /// then the values of the step before it. Page ids are requested ahead, because on a busy GPU
  /// they take as long to arrive as the keys. `queue_word`: this lane's word of QueueStart, from
  /// Sm90QueryLoader::request_queue().
  FLASHPLAN_DEVICE void load_steps(uint32_t queue_word) {
    const bool loads_keys = warp_ == 0;
    Step ahead = {};  // the step whose page ids are requested, but not yet its keys
    bool has_last = false;
    bool has_ahead = false;
    int32_t position = 0;  // twice the number of steps whose keys are requested
    for (int32_t i = 0;; ++i) {
      const Keys keys = i == 0 ? first_keys(queue_word) : keys_of(wait_context(i));
      int32_t head = keys.head;
      int32_t key = keys.begin;
      bool has_step = keys.has_steps;
      // A tile without keys, or the end of the queue, adds no step. The consumers then finish the
      // tile before it, so one round of the loop still loads step `ahead`. In a shared ring, its
      // values take the slot that the keys of a next step would have taken.
      const bool finishes = !has_step;
      do {
        const Step step = {head, key, max(min(S::kTileKv, keys.end - key), 0), keys.kv_row,
                           keys.first_seen - key};
        const int32_t page_id = wait_page_id();
        if (has_step) request_page_ids(step, keys);
        if (has_ahead) {
          const int32_t of_keys = position - (!S::kHasTwoRings && has_last ? 1 : 0);
          const int32_t of_values = position + (S::kHasTwoRings || finishes ? 1 : 2);
          load(loads_keys, loads_keys ? of_keys : of_values, ahead, page_id);
          position += 2;
        }
        has_last = has_ahead && !finishes;
        ahead = step;
        has_ahead = has_step;
        key += S::kTileKv;
        if (key >= keys.end) {
          key = keys.begin;
          has_step = has_step && ++head < keys.heads_end;
        }
      } while (has_step);
      if (finishes && keys.is_end) return;
      release_context(i);
    }
  }

 private:
  using Base::copy_rows;
  using Base::finish_copies;
  using Base::lane_;
  using Base::maps_;
  using Base::p_;
  using Base::release_context;
  using Base::report_pages;
  using Base::row_address;
  using Base::smem_;
  using Base::wait_context;
  using Base::warp_;

  /// The keys of a work tile.
  struct Keys {
    int32_t head;  // the first kv head
    int32_t heads_end;
    int32_t begin;
    int32_t end;
    int32_t kv_row;      // the segment's row of the page table, or first row of ragged k and v
    int32_t first_seen;  // the first key that any row sees
    bool has_steps;
    bool is_end;
  };
  FLASHPLAN_DEVICE Keys keys_of(const Sm90Context& context) const {
    const WorkTile& tile = context.tile;
    return {tile.kv_head,           tile.kv_head + tile.num_kv_heads,
            tile.kv_begin,          tile.kv_end,
            context.segment.kv_row, context.block().first_seen(p_),
            context.has_steps(),    context.is_end != 0};
  }
  /// The keys of the first tile. Unless the run reads lengths on the device (kv_lens), they follow
  /// from QueueStart, so they are requested before another warp has stored the tile's record.
  FLASHPLAN_DEVICE Keys first_keys(uint32_t queue_word) const {
    if (p_.tensors.kv_lens != nullptr) return keys_of(wait_context(0));
    // The member of QueueStart at an offset in bytes.
    const auto word = [&](int offset) {
      return static_cast<int32_t>(__shfl_sync(0xffffffffU, queue_word, offset / 4));
    };
    constexpr int kTile = FLASHPLAN_OFFSET_OF(QueueStart, tiles);
    constexpr int kSegment = FLASHPLAN_OFFSET_OF(QueueStart, segments);
    const bool is_end =
        word(FLASHPLAN_OFFSET_OF(QueueStart, begin)) >= word(FLASHPLAN_OFFSET_OF(QueueStart, end));
    const int32_t head = word(kTile + FLASHPLAN_OFFSET_OF(WorkTile, kv_head));
    const int32_t num_heads = word(kTile + FLASHPLAN_OFFSET_OF(WorkTile, num_kv_heads));
    const int32_t begin = word(kTile + FLASHPLAN_OFFSET_OF(WorkTile, kv_begin));
    const int32_t planned_end = word(kTile + FLASHPLAN_OFFSET_OF(WorkTile, kv_end));
    const int32_t merge = word(kTile + FLASHPLAN_OFFSET_OF(WorkTile, merge));
    const int32_t kv_row = word(kSegment + FLASHPLAN_OFFSET_OF(Segment, kv_row));
    const int32_t end = is_end ? 0 : min(planned_end, p_.tensors.pages.keys_of(kv_row));
    RowBlock block;
    block.rows.row_begin =
        word(kTile + FLASHPLAN_OFFSET_OF(WorkTile, row_tile)) * p_.schedule.tile_q;
    block.position = word(kSegment + FLASHPLAN_OFFSET_OF(Segment, position));
    block.keys = {begin, end};
    return {head,
            head + num_heads,
            begin,
            end,
            kv_row,
            block.first_seen(p_),
            !is_end && (begin < end || merge >= 0),
            is_end};
  }

  /// Keys [key, key + count) of one head.
  struct Step {
    int32_t head;
    int32_t key;
    int32_t count;  // number of keys, at most kTileKv
    int32_t kv_row;
    int32_t num_hidden;  // how many of the first keys no query row sees; may be negative
  };

  /// Keys in two tensors are never paged.
  FLASHPLAN_DEVICE bool is_paged() const {
    return !S::kHasKeyTail && p_.tensors.pages.ids != nullptr;
  }

  // Page ids are requested in batches. A batch has the ids of all boxes of steps_of_batch steps of
  // a head, and lane i requests id i. Each warp has two buffers for batches: one is in use while
  // the other is filled.

  /// Makes `step` the current step: wait_page_id() then returns its ids. At the first step of a
  /// head, requests the batch of this step; at the second step of a batch, requests the next batch.
  /// The next batch overwrites the previous one, which all lanes have read by then, because
  /// wait_page_id() synchronises the warp at the first step of each batch.
  FLASHPLAN_DEVICE void request_page_ids(const Step& step, const Keys& keys) {
    const int32_t boxes = maps_.boxes_of_step;
    if (S::kHasKeyTail || boxes == 0) return;
    --steps_left_;
    step_ids_ += boxes * 4;
    const bool begins = step.key == keys.begin;
    if (begins || steps_left_ == 0) {
      // If the ids of the last step end where the buffer ends, step_ids_ is behind the buffer; the
      // address 4 bytes before it is inside.
      step_ids_ = other_buffer(step_ids_ - 4);
      steps_left_ = maps_.steps_of_batch;
      if (begins) request_batch(step_ids_, step.key, keys);
    } else if (steps_left_ == maps_.steps_of_batch - 1) {
      request_batch(other_buffer(step_ids_), step.key + steps_left_ * S::kTileKv, keys);
    }
  }
  /// Requests a batch of ids by cp.async to shared memory. If ids were loaded to registers, these
  /// would be spilled to local memory, and the spill would wait until the ids have arrived.
  FLASHPLAN_DEVICE void request_batch(uint32_t to, uint32_t first, const Keys& keys) const {
    const uint32_t key = first + lane_ * maps_.box_rows;
    if (key >= static_cast<uint32_t>(keys.end)) return;
    const int32_t* ids = page_ids(p_.tensors.pages, keys.kv_row);
    cp_async_4(to + lane_ * 4, ids + quotient(key, p_.tensors.pages.page_size));
  }
  /// The page id of this lane's box of the current step. It has no meaning for lanes without a box.
  FLASHPLAN_DEVICE int32_t wait_page_id() const {
    if (S::kHasKeyTail || maps_.boxes_of_step == 0) return 0;
    if (steps_left_ == maps_.steps_of_batch) {  // the first step of a batch
      cp_async_wait_all();
      __syncwarp();
    }
    return static_cast<int32_t>(load_shared_4(step_ids_ + min(lane_, maps_.boxes_of_step - 1) * 4));
  }
  /// Where the other one of the warp's two buffers begins. `ids`: an address in one of them.
  static FLASHPLAN_DEVICE uint32_t other_buffer(uint32_t ids) {
    static_assert(FLASHPLAN_OFFSET_OF(Sm90SharedMemory<S>, page_ids) % (2 * kBatchBytes) == 0);
    return ids / kBatchBytes * kBatchBytes ^ kBatchBytes;
  }

  /// Fills a slot with keys or values. `position` counts the slots filled since the queue began;
  /// with two rings, those of keys have even positions.
  FLASHPLAN_DEVICE void load(bool is_key, int32_t position, const Step& step, int32_t page_id) {
    const int slot = position % kNumSlots;
    mbarrier_wait(smem_.slot_empty(slot), (position / kNumSlots & 1) ^ 1);
    const uint32_t to = smem_.slot(slot);
    uint32_t full = smem_.slot_full(slot);
    // Where keys are rotated, the rotator gets them before the consumers. For keys `position` is
    // twice the number of the step, or 1 less, so this gives the number of the step.
    if (S::kRotates && is_key) full = smem_.key_loaded((position + 1) / 2 % S::kSlots);
    const int32_t token = step.kv_row + step.key;  // row of ragged tensors
    if (!maps_.has_kv || (!is_paged() && token + S::kTileKv > maps_.num_kv_tokens)) {
      gather(p_, smem_.memory, is_key, to, step);
      finish_copies(full);
      return;
    }
    if (S::kHasKeyTail && is_key) {
      load_parts(to, full, token, step.head);
      return;
    }
    const int32_t num_rows = is_paged() ? step.count : S::kTileKv;
    const int first_row = lane_ * maps_.box_rows;
    const bool has_box = first_row < num_rows;
    const int box_bytes = maps_.box_rows * (is_key ? S::kKeyBytes : S::kValueBytes) / S::kTileKv;
    // Values past the last key have weights of 0, but 0 * NaN is NaN. So zeros overwrite these
    // values before the consumers see the slot. Keys need no zeros: logits past the last key are
    // masked.
    const bool hides = !is_key && step.count < S::kTileKv;
    const uint32_t loaded = hides ? smem_.tail_full(warp_) : full;
    const int num_boxes = __popc(__ballot_sync(0xffffffffU, has_box));
    // A box whose page id is outside of the cache is requested from outside of the tensor map, and
    // so becomes zeros. So does a box whose keys no query row sees: its page may be another
    // request's.
    const bool is_seen = first_row + maps_.box_rows > step.num_hidden;
    const bool on_page = has_page(p_.tensors.pages, page_id);
    if (is_key) report_pages(!has_box || !is_seen || on_page);
    if (lane_ == 0) mbarrier_arrive_expect(loaded, num_boxes * box_bytes);
    __syncwarp();
    if (has_box) {
      const auto first = static_cast<uint32_t>(step.key + first_row);
      const uint32_t page = quotient(first, p_.tensors.pages.page_size);
      const int in_page = static_cast<int>(first - page * p_.tensors.pages.page_size.value);
      const int slabs = is_key ? maps_.k_slabs_per_page : maps_.v_slabs_per_page;
      const int slab = is_seen && on_page ? page_id * slabs + step.head : -1;
      const int num_blocks = is_key ? S::Key::kBlocks : S::Value::kBlocks;
#pragma unroll 1
      for (int block = 0; block < (maps_.has_all_blocks ? 1 : num_blocks); ++block) {
        tma_load_5d(to + lane_ * box_bytes + block * 1024, is_key ? &maps_.k : &maps_.v, loaded,
                    block * 64, is_paged() ? 0 : token + first_row, 0, is_paged() ? in_page / 8 : 0,
                    slab);
      }
    }
    if (!hides) return;
    mbarrier_wait(loaded, tail_parity_);
    tail_parity_ ^= 1;
#pragma unroll 1
    for (int row = step.count + lane_ / 8; row < S::kTileKv; row += 4) {
#pragma unroll 1
      for (int block = 0; block < S::Value::kBlocks; ++block) {
        store_shared_16(to + row / 8 * S::Value::kGroupBytes + block * S::Value::kBlockBytes +
                            row % 8 * 128 + lane_ % 8 * 16,
                        {0, 0, 0, 0});
      }
    }
    finish_copies(full);
  }

  /// Requests the keys from row `token` on, each block of 64 dims from the tensor that has it.
  FLASHPLAN_DEVICE void load_parts(uint32_t to, uint32_t full, int32_t token, int32_t head) const {
    if (lane_ == 0) mbarrier_arrive_expect(full, S::kKeyBytes);
    __syncwarp();
    if (lane_ >= S::Key::kBlocks) return;
    const int own_blocks = (p_.tensors.head_dim_qk - p_.tails.k.num_dims) / 64;
    const bool is_own = lane_ < own_blocks;
    tma_load_5d(to + lane_ * S::Key::kBlockBytes, is_own ? &maps_.k : &maps_.k_tail, full,
                (is_own ? lane_ : lane_ - own_blocks) * 64, token, 0, 0, is_own ? head : 0);
  }

  /// Copies keys or values row by row, and writes zeros past the last key. Few plans need it. It is
  /// not inlined into the loop, because the code of the consumers lies behind the loop's code, and
  /// a longer loop would delay its fetch from memory.
  static __device__ __noinline__ void gather(const AttentionParams& p, Sm90SharedMemory<S>& memory,
                                             bool is_key, uint32_t to, Step step) {
    Sm90KvLoader(p, Sm90Smem<S>(memory), static_cast<int>(threadIdx.x) / 32 % 4)
        .copy_step(is_key, to, step);
  }
  FLASHPLAN_DEVICE void copy_step(bool is_key, uint32_t to, const Step& step) const {
    if (S::kHasKeyTail && is_key) {
      copy_parts(to, step);
      return;
    }
    const KvView& view = is_key ? p_.tensors.k : p_.tensors.v;
    const int head_dim = is_key ? p_.tensors.head_dim_qk : p_.tensors.head_dim_vo;
    const int num_blocks = is_key ? S::Key::kBlocks : S::Value::kBlocks;
    const int32_t kv_row = step.kv_row;
    const int32_t count = step.count;
#pragma unroll 1
    for (int first = 0; first < S::kTileKv; first += 32) {
      const int32_t own = step.key + min(max(first + lane_, step.num_hidden), count - 1);
      int32_t page = 0;
      int64_t in_page = count > 0 ? kv_row + own : 0;
      if (is_paged() && count > 0) {
        const uint32_t number = quotient(static_cast<uint32_t>(own), p_.tensors.pages.page_size);
        page = page_ids(p_.tensors.pages, kv_row)[number];
        in_page = own - static_cast<int32_t>(number) * p_.tensors.pages.page_size.value;
      }
      if (is_key) report_pages(has_page(p_.tensors.pages, page));
      const unsigned char* const row = row_address(view, page, in_page, step.head);
      copy_rows(to + first / 8 * num_blocks * 1024, num_blocks * 1024, 1024, row,
                min(S::kTileKv - first, 32), count - first, num_blocks, 2 * head_dim);
    }
  }

  /// Copies keys row by row, each from the two tensors that have its dims. Rows past the last key
  /// repeat this key.
  FLASHPLAN_DEVICE void copy_parts(uint32_t to, const Step& step) const {
#pragma unroll 1
    for (int r = lane_ / 8; r < S::kTileKv; r += 4) {
      const int64_t row = step.count > 0 ? step.kv_row + step.key + min(r, step.count - 1) : 0;
      const auto parts = KeyParts::of<2>(p_, row_address(p_.tensors.k, 0, row, step.head), row);
#pragma unroll 1
      for (int block = 0; block < S::Key::kBlocks; ++block) {
        const int chunk = block * 8 + lane_ % 8;
        copy_parts_16<2>(to + S::Key::offset(r, chunk), parts, chunk * 8, p_.tensors.vectorized);
      }
    }
  }

  static constexpr uint32_t kBatchBytes = sizeof(Sm90SharedMemory<S>::page_ids[0][0]);
  // A step has at most kTileKv / 8 boxes, so a batch of 32 ids has two steps at least.
  static_assert(S::kTileKv / 8 <= 16);
  uint32_t step_ids_ = smem_.page_ids(warp_);  // address of the current step's page ids
  int steps_left_ = 0;                         // steps left in its batch, itself included
  uint32_t tail_parity_ = 0;
};

}  // namespace flashplan::device
