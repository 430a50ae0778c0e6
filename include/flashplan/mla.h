// SPDX-License-Identifier: Apache-2.0
// The cache of multi-head latent attention: writing new keys into it, and gathering prefixes.
#pragma once

#include "flashplan/export.h"
#include "flashplan/rope.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// A cache of keys. A key has C latent dims, which are also its value, and R rotated dims. The
/// cache is one tensor, [num_pages, page_size, C + R], or with kFp8DsMla [num_pages, page_size,
/// kDsMlaBytes]; or two, [num_pages, page_size, C] and [num_pages, page_size, R]. Before the last
/// dimension there may be one of size 1, for the head. The last dimension is contiguous; the others
/// may have any strides.
struct MlaCache {
  TensorView latent;  // the latent dims; all dims if `tail` is empty
  TensorView tail;    // the rotated dims, or empty
};

/// New tokens and where they go. All tensors on one device.
struct MlaAppendTensors {
  TensorView kv_c;  // [>= tokens, C] float32, float16 or bfloat16
  TensorView k_pe;  // [>= tokens, R] of kv_c's dtype; empty: R is 0
  MlaCache cache;   // written; kv_c's dtype, an 8-bit float, or kFp8DsMla if kv_c is bfloat16
  /// [tokens] int64: token i goes to slot page * page_size + row in page; -1 skips it. Slots must
  /// differ.
  TensorView slot_mapping;
  /// [C] of kv_c's dtype or float32: kv_c is normalised by rmsnorm(); empty: it is not.
  TensorView norm_weight;
  TensorView positions;  // [>= tokens] int32 or int64; empty if there is no rotation
  /// Queries that are rotated in place: [>= tokens, num_heads, R] of kv_c's dtype, or empty.
  TensorView q_pe;
  /// append_mla() computes x / scale in float32 for each element x of a key, and stores these
  /// quotients in the dtype of the cache. If the magnitude of a quotient exceeds the largest finite
  /// number of an 8-bit dtype, that number is stored with the quotient's sign. `scale` must be a
  /// positive normal number of float32. With kFp8DsMla it must be 1, because there each group of
  /// 128 latent dims has a scale of its own: 1/448 of the largest magnitude in the group.
  float scale = 1.0F;
  float eps = 1e-6F;  // added to the mean of the squares; >= 0
};

/// Normalises the latent dims of new tokens, rotates the R other dims by the tokens' positions,
/// narrows both and writes them to the tokens' slots. It rounds where rmsnorm(), apply_rope() and
/// append_paged_kv(), called one after the other, would round. q_pe is rotated for skipped tokens,
/// too. If `rope` is null, nothing is rotated.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
/// Slots are not checked there: tokens with a slot outside of the cache are skipped.
///   kInvalidArgument, kInvalidType  a tensor is malformed, or what is written shares memory with
///                                   another argument; nothing was written
///   kCudaError                      the launch failed
FLASHPLAN_API Status append_mla(const MlaAppendTensors& tensors, const Rope* rope = nullptr,
                                Stream stream = nullptr) noexcept;

/// Ranges of cached tokens and where they go. All tensors on one device.
struct MlaGatherTensors {
  MlaCache cache;
  TensorView block_table;  // [>= batch_size, max_pages] int32 page ids
  /// [batch_size + 1] int32, ascending: rows kv_indptr[r] to kv_indptr[r + 1] - 1 of `out` belong
  /// to request r.
  TensorView kv_indptr;
  TensorView starts;  // [batch_size] int32: the first token of each request; empty: 0
  /// `out` [>= kv_indptr[batch_size], C + R] is written. If out_tail is given, `out` has only the C
  /// latent dims, and out_tail, with as many rows, the R others. Both have the dtype of the cache
  /// or, if that is 8-bit, float32, float16 or bfloat16. Rows of `out` that belong to no request
  /// are not written.
  TensorView out, out_tail;
  float scale = 1.0F;  // a gathered key is scale * stored key; a normal float > 0
};

/// Copies tokens starts[r], starts[r] + 1, ... of each request out of their pages, and widens 8-bit
/// floats. The caller then multiplies these keys, a chunk of a prefix, by the weights that expand
/// them to the keys and values of all heads.
///
/// On CUDA: one launch on `stream`, no allocation, no synchronisation; may be captured in a graph.
/// Values of index tensors are not checked there: a row whose page id is outside of the cache or of
/// the block table becomes 0.
///   kInvalidArgument, kInvalidType  a tensor is malformed, or `out` shares memory with another
///                                   argument; nothing was written
///   kCudaError                      the launch failed
FLASHPLAN_API Status gather_mla(const MlaGatherTensors& tensors, Stream stream = nullptr) noexcept;

}  // namespace flashplan
