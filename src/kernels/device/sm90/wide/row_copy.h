// SPDX-License-Identifier: Apache-2.0
// Copies keys and values that no box of a tensor map brings: row by row, by one warp.
#pragma once

#include "kernels/device/key_tail.h"
#include "kernels/device/pages.h"
#include "kernels/device/sm90/hopper.h"
#include "kernels/device/sm90/mla/shared_memory.h"
#include "kernels/device/unaligned_copy.h"

namespace flashplan::device {

/// Makes a warp's copies visible to wgmma, and arrives at `full`.
FLASHPLAN_DEVICE void finish_row_copies(uint32_t full) {
  cp_async_wait_all();
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
}

/// A block of keys of one kv head.
struct WideBlock {
  int32_t key;
  int32_t count;       // keys; the block may have more rows
  int32_t num_hidden;  // how many of the first keys no query sees; may be negative
  int32_t kv_row;
  int32_t kv_head;
};

/// Copies half of the dims of a block's keys or values, from dim `first_dim` on, and announces it
/// at `full`. Zeros replace rows past the last key, whose weights are 0, because 0 * NaN is NaN.
/// Keys that no query sees are replaced by copies of the first key that some query sees. Keys whose
/// page ids are outside of the cache become zeros, and the word at `on_pages` becomes
/// kSomeOffPages. It is not inlined, because few plans need it often.
template <typename S>
__device__ __noinline__ void copy_wide_rows(const AttentionParams& p, bool is_key, uint32_t to,
                                            uint32_t full, WideBlock block, int first_dim,
                                            uint32_t on_pages) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const KvView& view = is_key ? p.tensors.k : p.tensors.v;
  const int num_dims = is_key ? p.tensors.head_dim_qk : p.tensors.head_dim_vo;
  const int num_own = num_dims - (is_key ? p.tails.k.num_dims : 0);
  const PageTable& pages = p.tensors.pages;
  bool are_on_pages = true;
#pragma unroll 1
  for (int r = lane / 8; r < S::kTileKv; r += 4) {
    int32_t page = 0;
    int64_t row = 0;  // row in the page; ragged keys are one page
    const bool exists = r < block.count;
    if (exists) {
      const int32_t key = block.key + min(max(r, block.num_hidden), block.count - 1);
      row = int64_t{block.kv_row} + key;
      if (pages.ids != nullptr) {
        const auto number =
            static_cast<int32_t>(quotient(static_cast<uint32_t>(key), pages.page_size));
        page = page_ids(pages, block.kv_row)[number];
        row = key - number * pages.page_size.value;
      }
    }
    const bool on_page = has_page(pages, static_cast<uint32_t>(page));
    are_on_pages = are_on_pages && on_page;
    const unsigned char* own = zero_row();
    const unsigned char* tail = own;
    if (on_page) {
      own = static_cast<const unsigned char*>(view.data) +
            2 * (page * view.page_stride + row * view.token_stride +
                 block.kv_head * view.head_stride);
      if (num_own < num_dims) {
        tail = static_cast<const unsigned char*>(p.tails.k.view.data) +
               2 * row * p.tails.k.view.token_stride;
      }
    }
    const KeyParts parts = {own, tail, num_own, exists ? num_dims : 0};
#pragma unroll 1
    for (int b = 0; b < S::Half::kBlocks; ++b) {
      const int chunk = b * 8 + lane % 8;
      copy_parts_16<2>(to + S::Half::offset(r, chunk), parts, first_dim + chunk * 8,
                       p.tensors.vectorized);
    }
  }
  if (__all_sync(0xffffffffU, are_on_pages) == 0) store_shared_4(on_pages, kSomeOffPages);
  finish_row_copies(full);
}

}  // namespace flashplan::device
