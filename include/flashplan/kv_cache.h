// SPDX-License-Identifier: Apache-2.0
// Writing new keys and values into a paged cache.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/plan.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// New tokens of a batch and the cache they go to. All tensors on one device.
struct AppendTensors {
  TensorView k, v;     // [>= indptr[batch_size], num_kv_heads, head_dim], the new tokens, ragged
  TensorView k_cache;  // pages in `layout`, written; k's dtype or an 8-bit float
  TensorView v_cache;  // head_dim may differ from k's
  TensorView indptr;   // [batch_size + 1] int32: rows of k and v of each request
  TensorView kv_lens;  // [batch_size] int32: length of each request after the append
  TensorView block_table;  // as in AttentionTensors
  TensorView page_indptr;
  TensorView page_indices;
  KvLayout layout = KvLayout::kNHD;
  /// Stored key = key / k_scale in float32, saturating in 8-bit formats. Normal floats > 0.
  float k_scale = 1.0F;
  float v_scale = 1.0F;
};

/// Writes new token j of request r to position kv_lens[r] - (indptr[r+1] - indptr[r]) + j of the
/// request's pages. A page must not be written by two requests.
///
/// On CUDA: one launch on `stream` (two if k and v differ in dtype), no allocation, no
/// synchronisation; may be captured in a graph, which then serves any batch of kv_lens.shape[0]
/// requests and up to k.shape[0] tokens. The values of indptr, kv_lens and the page table are in
/// device memory and not checked: they must be valid, as the CPU requires. One exception: a token
/// whose page id is outside the cache is not written.
///   kInvalidArgument, kInvalidType  a tensor is malformed, or a cache shares memory with another
///                                   argument; nothing was written
///   kCudaError                      the launch failed
FLASHPLAN_API Status append_paged_kv(const AppendTensors& tensors,
                                     Stream stream = nullptr) noexcept;

}  // namespace flashplan
