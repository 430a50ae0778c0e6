// SPDX-License-Identifier: Apache-2.0
// What all warps of the sm90 producer do: they read records of work tiles, and copy rows that no
// tensor map describes.
#pragma once

#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/shared_memory.h"
#include "kernels/device/unaligned_copy.h"

namespace flashplan::device {

template <typename S>
class Sm90ProducerWarp {
 public:
  /// `warp`: this warp's number in its warpgroup.
  FLASHPLAN_DEVICE Sm90ProducerWarp(const AttentionParams& p, const Sm90Smem<S>& smem, int warp)
      : p_(p), maps_(p.maps), smem_(smem), warp_(warp), lane_(static_cast<int>(threadIdx.x) % 32) {}

 protected:
  FLASHPLAN_DEVICE const Sm90Context& wait_context(int32_t i) const {
    const int slot = i % S::kContexts;
    mbarrier_wait(smem_.context_full(slot), i / S::kContexts & 1);
    return smem_.memory.contexts[slot];
  }
  /// Whether the record of work tile number `i` has arrived.
  FLASHPLAN_DEVICE bool has_context(int32_t i) const {
    return __all_sync(0xffffffffU,
                      mbarrier_test(smem_.context_full(i % S::kContexts), i / S::kContexts & 1));
  }
  /// The number of the prepared tile where the keys of context `i`'s segment begin. The context
  /// must have arrived, and its keys must be prepared.
  FLASHPLAN_DEVICE int32_t first_prepared(int32_t i) const {
    return static_cast<int32_t>(load_shared_4(smem_.first_prepared(i % S::kContexts)));
  }
  /// Whether the keys of context `i`, which has arrived, are prepared.
  FLASHPLAN_DEVICE bool is_prepared(int32_t i) const {
    return p_.prepared.states != nullptr && first_prepared(i) >= 0;
  }
  FLASHPLAN_DEVICE void release_context(int32_t i) const {
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(smem_.context_empty(i % S::kContexts));
  }

  /// Tells the consumers if page ids of a step's keys are outside of the cache. It must be called
  /// before the keys are announced. `on_page`: whether the page id of this lane's keys is inside.
  FLASHPLAN_DEVICE void report_pages(bool on_page) const {
    if (__all_sync(0xffffffffU, on_page) == 0) store_shared_4(smem_.on_pages(), kSomeOffPages);
  }

  /// Starts to load the id of a key's page. `ids`: the page ids of its request.
  FLASHPLAN_DEVICE int32_t request_page(const int32_t* ids, int32_t key) const {
    return static_cast<int32_t>(request_page_id(p_.tensors.pages, ids, key));
  }
  /// The row of a key in its page. Ragged keys have no pages: all rows of the tensor count as one.
  FLASHPLAN_DEVICE uint32_t place_in_page(int32_t key) const {
    const PageTable& pages = p_.tensors.pages;
    const auto own = static_cast<uint32_t>(key);
    if (pages.ids == nullptr) return own;
    return row_in_page(pages, own);
  }

  /// The address of row `row` of page `page`, for one head. Ragged tensors have page 0 alone. For a
  /// page outside of the cache, the address is that of a row of zeros.
  FLASHPLAN_DEVICE const unsigned char* row_address(const KvView& view, int32_t page, int64_t row,
                                                    int32_t head) const {
    if (!has_page(p_.tensors.pages, page)) return zero_row();
    return static_cast<const unsigned char*>(view.data) +
           Element<S::kKv>::kBytes *
               (page * view.page_stride + row * view.token_stride + head * view.head_stride);
  }

  /// Makes this warp's copies visible to wgmma, and arrives at `full`.
  FLASHPLAN_DEVICE void finish_copies(uint32_t full) const {
    cp_async_wait_all();
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(full);
  }

  /// Copies up to 32 rows of `num_blocks` blocks of 128 bytes; lane r gives the address of row r in
  /// `row`. Zeros replace the rows from `num_valid` on, and the bytes of each row from `num_bytes`
  /// on.
  FLASHPLAN_DEVICE void copy_rows(uint32_t tile, int group_bytes, int block_bytes,
                                  const unsigned char* row, int num_rows, int num_valid,
                                  int num_blocks, int num_bytes) const {
    const int chunk = lane_ % 8;
#pragma unroll 1
    for (int r = lane_ / 8; r < num_rows; r += 4) {
      const auto* from = shuffled_pointer(row, r);
      uint32_t to = tile + r / 8 * group_bytes + r % 8 * 128 + ((chunk ^ r) % 8 << 4);
      const int valid = r < num_valid ? num_bytes : 0;
#pragma unroll 1
      for (int byte = chunk * 16; byte < num_blocks * 128; byte += 128, to += block_bytes) {
        copy_16(to, from + byte, valid - byte, row);
      }
    }
  }

  /// Copies 16 bytes, of which the first `num_valid` exist; zeros replace the others. `any`: an
  /// address that may be read where none of them exists.
  FLASHPLAN_DEVICE void copy_16(uint32_t to, const unsigned char* from, int num_valid,
                                const unsigned char* any) const {
    if (p_.tensors.vectorized) {
      cp_async_16_padded(to, num_valid > 0 ? from : any, num_valid > 0 ? 16 : 0);
    } else {
      constexpr int kBytes = S::kTakesNarrowQueries ? 1 : 2;
      copy_unaligned_16<kBytes>(to, from, num_valid / kBytes);
    }
  }

  const AttentionParams& p_;
  const TensorMaps& maps_;
  const Sm90Smem<S> smem_;
  const int warp_;
  const int lane_;
};

}  // namespace flashplan::device
