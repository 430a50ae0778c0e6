// SPDX-License-Identifier: Apache-2.0
// The warp of the sm90_wide producer that brings keys and values: by boxes of tensor maps or, where
// these cannot, row by row.
#pragma once

#include "kernels/device/sm90/mla/key_loader.h"
#include "kernels/device/sm90/wide/row_copy.h"

namespace flashplan::device {

/// Works as one warp, whose lane i brings box i of each half of a block. It brings blocks in the
/// order in which consumers free memory: the keys of two blocks, which the two consumer warpgroups
/// read at the same time, then the values of both. Each half of a block waits until its place is
/// free (MlaSharedMemory, 10).
template <typename S>
class WideKvLoader : MlaKeyWarp<S> {
  using Base = MlaKeyWarp<S>;
  using Block = typename Base::Block;

 public:
  using Base::Base;

  FLASHPLAN_DEVICE void run() {
    uint32_t number = 0;
    using Keys = typename Base::Keys;
    const auto fill_blocks = [&](const Keys& keys, const Sm90Context& context,
                                 const auto& block_at) {
      const int32_t begin = keys.begin;
      const int32_t count = num_blocks<S>(begin, keys.end);
      const int32_t head = context.tile.kv_head;
      const auto at = [&](int32_t n) { return block_at(begin + n * S::kTileKv); };
      int32_t ids[2] = {request(at(0)), request(at(1))};
#pragma unroll 1
      for (int32_t n = 0; n < count; n += 2, number += 2) {
        const bool has_second = n + 1 < count;
        const int32_t next_ids[2] = {request(at(n + 2)), request(at(n + 3))};
        load(true, at(n), head, number, ids[0]);
        if (has_second) load(true, at(n + 1), head, number + 1, ids[1]);
        load(false, at(n), head, number, ids[0]);
        if (has_second) load(false, at(n + 1), head, number + 1, ids[1]);
        prefetch(at(n + 2), head, next_ids[0]);
        prefetch(at(n + 3), head, next_ids[1]);
        ids[0] = next_ids[0];
        ids[1] = next_ids[1];
      }
      number -= count % 2;  // the loop counts two blocks, but the last round may have had one
    };
    Base::for_each_tile([](int32_t) {}, fill_blocks);
  }

 private:
  using Base::lane_;
  using Base::p_;
  using Base::smem_;

  static constexpr int kBlocksOfHalf = S::Half::kBlocks;

  FLASHPLAN_DEVICE bool is_paged() const { return p_.tensors.pages.ids != nullptr; }
  /// The first row of this lane's box.
  FLASHPLAN_DEVICE int own_row() const { return lane_ * p_.maps.box_rows; }
  FLASHPLAN_DEVICE int32_t request(const Block& block) const {
    return Base::request_page_id(block, own_row());
  }
  /// Whether boxes bring a block. A box of ragged rows must not reach past the tensor's end.
  FLASHPLAN_DEVICE bool has_boxes(const Block& block) const {
    const bool is_inside =
        is_paged() || block.kv_row + block.key + S::kTileKv <= p_.maps.num_kv_tokens;
    return p_.maps.has_kv && is_inside;
  }

  /// The coordinates of this lane's box in a map. A box whose page id is outside of the cache is
  /// requested from outside of the map, and so becomes zeros. So does a box whose keys no query of
  /// the tile sees: its page may belong to another request.
  struct Place {
    int row;
    int group;  // number, in the page, of the group of 8 rows in which the box begins
    int slab;
    bool exists;
    bool is_off_page;  // a query sees keys of the box, whose page id is outside of the cache
  };
  FLASHPLAN_DEVICE Place place(bool is_key, const Block& block, int32_t head, int32_t id) const {
    const int row = own_row();
    const bool is_seen = row + p_.maps.box_rows > block.num_hidden;
    if (!is_paged()) {
      return {block.kv_row + block.key + row, 0, is_seen ? head : -1, row < S::kTileKv, false};
    }
    const PageTable& pages = p_.tensors.pages;
    const auto in_page =
        static_cast<int>(row_in_page(pages, static_cast<uint32_t>(block.key + row)));
    const bool on_page = has_page(pages, static_cast<uint32_t>(id));
    const int slabs = is_key ? p_.maps.k_slabs_per_page : p_.maps.v_slabs_per_page;
    const bool exists = row < block.count;
    return {0, in_page / 8, is_seen && on_page ? id * slabs + head : -1, exists,
            exists && is_seen && !on_page};
  }

  /// Brings keys and values of a block to the L2 cache, if this CTA is to prefetch the block.
  FLASHPLAN_DEVICE void prefetch(const Block& block, int32_t head, int32_t id) const {
    if (!block.is_prefetched || block.count == 0 || !has_boxes(block)) return;
    const Place keys = place(true, block, head, id);
    const Place values = place(false, block, head, id);
    if (!keys.exists || keys.slab < 0) return;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int dims = part * kBlocksOfHalf;
      tma_prefetch_5d(&p_.maps.k, 0, keys.row, dims, keys.group, keys.slab);
      tma_prefetch_5d(&p_.maps.v, 0, values.row, dims, values.group, values.slab);
    }
  }

  /// Brings the keys of a block, or its values.
  FLASHPLAN_DEVICE void load(bool is_key, const Block& block, int32_t head, uint32_t number,
                             int32_t id) {
    if (has_boxes(block)) {
      load_boxes(is_key, block, head, number, id);
      return;
    }
    const WideBlock rows = {block.key, block.count, block.num_hidden, block.kv_row, head};
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      wait_free(is_key, number, part);
      copy_wide_rows<S>(p_, is_key, smem_.half(number, part), full(is_key, number, part), rows,
                        part * S::kHalfDims, smem_.on_pages());
    }
  }
  FLASHPLAN_DEVICE void wait_free(bool is_key, uint32_t number, int part) const {
    Base::wait(is_key ? smem_.values_read(number, part) : smem_.keys_read(number, part));
  }
  FLASHPLAN_DEVICE uint32_t full(bool is_key, uint32_t number, int part) const {
    return is_key ? smem_.full(number, part).barrier : smem_.values_full(number, part).barrier;
  }

  FLASHPLAN_DEVICE void load_boxes(bool is_key, const Block& block, int32_t head, uint32_t number,
                                   int32_t id) {
    const Place own = place(is_key, block, head, id);
    if (is_key) Base::report_pages(!own.is_off_page);
    const int box_bytes = p_.maps.box_rows * S::kHalfDims * 2;
    const int num_boxes = __popc(__ballot_sync(0xffffffffU, own.exists));
    // Values past the last key have weights of 0, but 0 * NaN is NaN: hide_rows() replaces these
    // values by zeros before the consumers see the block. Keys need no zeros: logits past the last
    // key are masked.
    const bool hides = !is_key && block.count < S::kTileKv;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      wait_free(is_key, number, part);
      const uint32_t loaded = hides ? smem_.tail_full() : full(is_key, number, part);
      if (lane_ == 0) {
        if (hides) {
          mbarrier_expect(loaded, num_boxes * box_bytes);
        } else {
          mbarrier_arrive_expect(loaded, num_boxes * box_bytes);
        }
      }
      __syncwarp();
      if (own.exists) {
        tma_load_5d(smem_.half(number, part) + lane_ * box_bytes, is_key ? &p_.maps.k : &p_.maps.v,
                    loaded, 0, own.row, part * kBlocksOfHalf, own.group, own.slab);
      }
    }
    if (hides) {
      Base::hide_rows(block, number,
                      [&](int part) { return smem_.values_full(number, part).barrier; });
    }
  }
};

}  // namespace flashplan::device
