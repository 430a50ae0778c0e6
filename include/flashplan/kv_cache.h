// SPDX-License-Identifier: Apache-2.0
// Writes new keys and values into a paged cache.
#pragma once

#include <cstdint>

#include "flashplan/export.h"
#include "flashplan/plan.h"
#include "flashplan/rope.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// The keys and values of a batch's new tokens, and the cache that append_paged_kv() writes them
/// to. All tensors must be on the same device.
struct AppendTensors {
  TensorView k, v;     // [>= indptr[batch_size], num_kv_heads, head_dim], the new tokens, ragged
  TensorView k_cache;  // written: pages as KvLayout says; k's dtype or an 8-bit float
  TensorView v_cache;  // written: like k_cache, but v's dtype and head_dim may differ from k's
  TensorView indptr;   // [batch_size + 1] int32: rows of k and v of each request
  TensorView kv_lens;  // [batch_size] int32: length of each request after the append
  TensorView block_table;  // as in AttentionTensors
  TensorView page_indptr;
  TensorView page_indices;
  /// [tokens] int64, instead of indptr, kv_lens and the page table: row i of k and v goes to slot
  /// page * page_size + row in page; a row whose slot is -1 is skipped. No two rows may have the
  /// same slot.
  TensorView slot_mapping;
  /// [tokens] int32 each, instead of indptr and kv_lens: row i of k and v goes to position
  /// positions[i] of request batch_indices[i] of the page table; a row whose batch index is -1 is
  /// skipped. No two rows may have the same place.
  TensorView batch_indices;
  TensorView positions;
  KvLayout layout = KvLayout::kNHD;
  /// append_paged_kv() computes key / k_scale and value / v_scale in float32, and stores these
  /// quotients in the dtype of the cache. If the magnitude of a quotient exceeds the largest finite
  /// number of an 8-bit dtype, that number is stored with the quotient's sign. k_scale and v_scale
  /// must be positive normal numbers of float32.
  float k_scale = 1.0F;
  float v_scale = 1.0F;
  /// [1] or [num_kv_heads] float32, on the device of the caches, or empty: factors by which k_scale
  /// and v_scale are multiplied, one for all kv heads or one for each. The values of the factors
  /// are not checked on a GPU.
  TensorView k_scales, v_scales;
  /// For rope_append_paged_kv() only: programmatic dependent launch, see AttentionTensors.
  bool pdl = false;
};

/// Writes new token j of request r to position kv_lens[r] - (indptr[r+1] - indptr[r]) + j of the
/// request's pages, or each token to its slot or position. A page must not be written by two
/// requests.
///
/// On CUDA: one launch on `stream` (two if k and v differ in dtype), no allocation, no
/// synchronisation; may be captured in a graph, which then serves any batch of kv_lens.shape[0]
/// requests and up to k.shape[0] tokens. The values of indptr, kv_lens, the page table, slots,
/// batch_indices and positions are in device memory and not checked: a token whose page id or slot
/// is outside the cache, or whose length leads beyond its row of the page table, is not written.
/// Plan::check_device_data() finds such values, for debugging.
///   kInvalidArgument, kInvalidType  a tensor is malformed, or a cache shares memory with another
///                                   argument; nothing was written
///   kCudaError                      the launch failed
FLASHPLAN_API Status append_paged_kv(const AppendTensors& tensors,
                                     Stream stream = nullptr) noexcept;

/// Does what apply_rope() and append_paged_kv() do, with the same bits. It rotates the new tokens
/// of q [>= indptr[batch_size], num_qo_heads, head_dim] and of k by their positions in their
/// requests. It writes q to `out_q`, which is shaped like q and may be q, and k and v to their
/// pages. k itself is not changed. Rows of q that belong to no request are not written.
///
/// q, k and v have one dtype: float32, float16 or bfloat16; the caches have this dtype too, or both
/// have the same 8-bit float dtype. slot_mapping, batch_indices and positions must be empty, since
/// positions follow from kv_lens.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph,
/// as append_paged_kv() may. If the page id of a token lies outside the cache, its query is
/// rotated, but its key and value are not written.
///   kInvalidArgument, kInvalidType  an argument is malformed, or what is written shares memory
///                                   with another argument; nothing was written
///   kCudaError                      the launch failed
FLASHPLAN_API Status rope_append_paged_kv(const TensorView& q, const AppendTensors& tensors,
                                          const Rope& rope, const TensorView& out_q,
                                          Stream stream = nullptr) noexcept;

}  // namespace flashplan
