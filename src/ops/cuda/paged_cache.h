// SPDX-License-Identifier: Apache-2.0
// What append_paged_kv() and rope_append_paged_kv() have in common on CUDA: where tokens go in a
// paged cache, and how their elements are stored there.
#pragma once

#include <cstdint>

#include "abi/divisor.h"
#include "ops/cuda/formats.h"
#include "ops/params.h"

namespace flashplan::cuda {

/// Where a token goes. page < 0: nowhere.
struct Place {
  int32_t page;
  int32_t row_in_page;

  static __device__ Place of(int32_t page, int32_t row_in_page, int32_t /*key*/) {
    return {page, row_in_page};
  }
  static __device__ Place none() { return {-1, 0}; }
};

/// Where a token goes, and `key`, its position among the keys of its request. key < 0: the token
/// belongs to no request, or the caller gives only its slot.
struct PlaceOfKey {
  int32_t page;
  int32_t row_in_page;
  int32_t key;

  static __device__ PlaceOfKey of(int32_t page, int32_t row_in_page, int32_t key) {
    return {page, row_in_page, key};
  }
  static __device__ PlaceOfKey none() { return {-1, 0, -1}; }
};

/// find_places() for tokens whose slots in the cache are given.
template <int kThreads, class PlaceType>
__device__ void find_slots(const TokenPlaces& p, int first, int end, int tile, PlaceType* places) {
  const int64_t page_size = p.pages.page_size.value;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < tile; i += kThreads) {
    const int64_t slot = first + i < end ? p.slots[first + i] : -1;
    const int64_t page = slot < 0 ? -1 : slot / page_size;
    const bool is_page = page >= 0 && page < p.pages.num_pages;
    places[i] = is_page ? PlaceType::of(static_cast<int32_t>(page),
                                        static_cast<int32_t>(slot - page * page_size), -1)
                        : PlaceType::none();
  }
}

/// find_places() for tokens whose requests and positions are given.
template <int kThreads, class PlaceType>
__device__ void find_positions(const TokenPlaces& p, int first, int end, int tile,
                               PlaceType* places) {
  const Divisor& page_size = p.pages.page_size;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < tile; i += kThreads) {
    const int request = first + i < end ? p.requests[first + i] : -1;
    const int key = first + i < end ? p.positions[first + i] : -1;
    places[i] = PlaceType::none();
    if (request < 0 || request >= p.batch_size || key < 0) continue;
    const PageTable::Row ids = p.pages.row_of(request);
    const auto page_of_request =
        static_cast<int32_t>(quotient(static_cast<uint32_t>(key), page_size));
    const int32_t page =
        page_of_request < ids.count ? p.pages.ids[ids.first + page_of_request] : -1;
    places[i] = PlaceType::of(page < p.pages.num_pages ? page : -1,
                              key - page_of_request * page_size.value, key);
  }
}

/// Writes places[0] to places[tile - 1]: that of token first + i to places[i], or none() if the
/// token is not below `end`. All kThreads threads of a CTA call it, and need a barrier before they
/// read places.
template <int kThreads, class PlaceType>
__device__ void find_places(const TokenPlaces& p, int first, int end, int tile, PlaceType* places) {
  if (p.slots != nullptr) return find_slots<kThreads>(p, first, end, tile, places);
  if (p.requests != nullptr) return find_positions<kThreads>(p, first, end, tile, places);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < tile; i += kThreads) places[i] = PlaceType::none();
  // A binary search of indptr would be a chain of slow loads. Instead each thread loads the bounds
  // of one request. If there are more requests than threads, the threads first try every stride-th
  // request, to find where the tile begins.
  int base = 0;
  if (p.batch_size <= kThreads) {
    __syncthreads();
  } else {
    const int stride = (p.batch_size + kThreads - 1) / kThreads;
    const int probe = thread * stride;
    const int begun = __syncthreads_count(probe < p.batch_size && p.indptr[probe] <= first);
    base = max(begun - 1, 0) * stride;
  }
  const int num_tokens = min(tile, end - first);
  for (;; base += kThreads) {
    const int request = base + thread;
    int begin = 0;   // the request's first token, counted from the start of the tile
    int behind = 0;  // the end of the request's tokens in the tile
    int shift = 0;   // key of a token = shift + its place in the tile
    PageTable::Row ids;
    if (request < p.batch_size) {
      const int end_of_request = p.indptr[request + 1];
      begin = max(p.indptr[request] - first, 0);
      behind = min(end_of_request - first, num_tokens);
      shift = max(p.kv_lens[request], 0) - end_of_request + first;
      ids = p.pages.row_of(request);
    }
    // All lanes of a warp look up the pages of one of its requests, and then those of the next.
    for (unsigned hits = __ballot_sync(~0U, begin < behind); hits != 0; hits &= hits - 1) {
      const int source = __ffs(static_cast<int>(hits)) - 1;
      const int last = __shfl_sync(~0U, behind, source);
      const int first_key = __shfl_sync(~0U, shift, source);
      const int64_t first_id = __shfl_sync(~0U, ids.first, source);
      const int num_ids = __shfl_sync(~0U, ids.count, source);
#pragma unroll 1
      for (int i = __shfl_sync(~0U, begin, source) + thread % 32; i < last; i += 32) {
        const int key = first_key + i;
        if (key < 0) continue;
        const Divisor& page_size = p.pages.page_size;
        const auto page_of_request =
            static_cast<int32_t>(quotient(static_cast<uint32_t>(key), page_size));
        const int32_t page =
            page_of_request < num_ids ? p.pages.ids[first_id + page_of_request] : -1;
        places[i] = PlaceType::of(page < p.pages.num_pages ? page : -1,
                                  key - page_of_request * page_size.value, key);
      }
    }
    if (base + kThreads >= p.batch_size || p.indptr[base + kThreads] - first >= num_tokens) return;
  }
}

/// A word of k or v as its cache stores it. `scale` is that of the word's head.
template <DType kFrom, DType kTo, int kVec>
__device__ Word<kTo, kVec> stored(const AppendSide& side, float scale, Word<kFrom, kVec> word) {
  if constexpr (kFrom == kTo) {
    if (side.verbatim) return word;
  }
  return narrowed<kFrom, kTo, kVec>(word, scale);
}

/// Whether every head can be read and stored in aligned words of `elements` elements.
inline bool allows_words(const AppendSide& side, int elements) {
  const int to_bytes = elements * static_cast<int>(item_size(side.cache_dtype));
  return side.head_dim % elements == 0 &&
         is_aligned(side.rows, 16, side.token_stride, side.row_head_stride) &&
         is_aligned(side.cache, to_bytes, side.page_stride, side.row_stride, side.head_stride);
}

}  // namespace flashplan::cuda
