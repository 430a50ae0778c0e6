// SPDX-License-Identifier: Apache-2.0
// The argument of every attention kernel: plain data, passed by value on a GPU. Strides are in
// elements. All fields are initialised, so that a pointer that nobody sets is null and not a stale
// address.
//
// Groups and fields are in the order in which a GPU kernel first reads them. A GPU fetches
// parameters from memory in lines of 64 bytes, so fields that are needed together should share a
// line (docs/tuning/sm80.md).
#pragma once

#include <cstdint>

#include "abi/divisor.h"
#include "abi/head_scales.h"
#include "abi/kv_view.h"
#include "abi/mask.h"
#include "abi/prepared_kv.h"
#include "abi/rope_turns.h"
#include "abi/sinks.h"
#include "abi/tensor_maps.h"
#include "abi/work_queue.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// The mask_begin of a request whose mask begins at the position of its first query.
constexpr int32_t kAtFirstQuery = -0x7fffffff - 1;

/// The schedule of a batch, in memory of the device that runs it; see plan/schedule/schedule.h.
struct ScheduleParams {
  const QueueStart* starts = nullptr;  // [num_ctas]; only on a GPU
  int32_t tile_q = 0;
  Divisor group_size = {};  // query heads of a kv head
  int32_t chunk_kv = 0;     // keys of a chunk; each chunk has a state; 0: each work tile has one
  const Segment* segments = nullptr;
  const WorkTile* tiles = nullptr;
  const Merge* merges = nullptr;
  Arrivals* arrivals = nullptr;          // [merges]; zero when a run begins
  const int32_t* mask_begins = nullptr;  // [batch_size] keys or kAtFirstQuery; null without a mask
  int32_t num_ctas = 0;
  /// Whether this kernel runs at the same time as the previous kernel on the stream, which belongs
  /// to the same run. It then waits for the end of that kernel at its own end, not at its start.
  bool beside_last = false;
};

/// A tensor [num_tokens, num_qo_heads, ...].
template <typename T>
struct TokenView {
  T* data = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

/// The caller's tensors.
struct TensorParams {
  PageTable pages = {};
  const int32_t* kv_lens = nullptr;  // [batch_size] real lengths; null: the planned ones
  TokenView<const void> q = {};      // [..., head_dim_qk]
  KvView k = {};
  KvView v = {};
  TokenView<void> o = {};     // [..., head_dim_vo]
  TokenView<float> lse = {};  // data is null where lse is not wanted
  float lse_scale = 1.0F;     // converts natural logarithms to the base of lse
  DType q_dtype = DType::kFloat32;
  DType kv_dtype = DType::kFloat32;
  DType o_dtype = DType::kFloat32;
  bool vectorized = false;    // q, k, v and o can be accessed 16 bytes at a time (GPU)
  bool has_key_tail = false;  // the last dims of ragged keys are in TailParams (GPU)
  int32_t head_dim_qk = 0;
  int32_t head_dim_vo = 0;
  MaskBits mask = {};
};

/// Scales, softcap and sinks, which change logits, weights and results.
struct VariantParams {
  // softmax_scale * q_scale * k_scale, to be multiplied with AttentionParams::head_scale()
  float logits_scale = 0.0F;
  float softcap = 0.0F;  // 0: off
  float v_scale = 0.0F;
  Sinks sinks = {};
  HeadScales k_scales = {};
  HeadScales v_scales = {};
};

/// The caller's workspace; see plan/workspace_layout.h.
struct WorkspaceParams {
  void* scratch = nullptr;    // [num_ctas, scratch_bytes]: one for each queue (GPU) or worker (CPU)
  int64_t scratch_bytes = 0;  // a multiple of 16
  float* partial_o = nullptr;
  float* partial_lse = nullptr;
};

/// Parameters that only the host reads.
struct HostParams {
  bool shared_kv = false;               // values are the first dims of keys, and v is k
  const RopeTurns* rope = nullptr;      // rotation of queries and keys (CPU); null: none
  const int32_t* cta_indptr = nullptr;  // [num_ctas + 1]: index of each queue's first work tile
  int32_t first_merge = 0;              // number of the first merge in use
  int32_t num_merges = 0;               // merges in use, from first_merge on
  int64_t total_cost = 0;               // predicted cost of all work tiles
  bool has_few_rows = false;  // the smallest tile holds the packed rows of an average request
  bool pdl = false;           // programmatic dependent launch
};

constexpr int32_t kMaxVariantTensors = 8;
constexpr int32_t kMaxVariantScalars = 8;

/// The tensors and scalars that a user's variant reads, in the order of its description.
struct VariantArguments {
  const void* tensors[kMaxVariantTensors] = {};
  float scalars[kMaxVariantScalars] = {};
};

/// The last dims of queries and keys, if they lie in tensors of their own.
struct TailParams {
  TokenView<const void> q = {};
  int32_t q_dims = 0;  // dims of a head in this q; 0: TensorParams::q has all dims
  KeyTail k = {};
};

struct AttentionParams {
  ScheduleParams schedule = {};
  TensorParams tensors = {};
  Mask mask = {};
  VariantParams variant = {};
  WorkspaceParams workspace = {};
  HostParams host = {};
  TensorMaps maps = {};             // read by kernels with KernelGeometry::uses_tensor_maps
  VariantArguments arguments = {};  // read by users' variants
  PreparedKv prepared = {};         // read by kernels that can prepare keys
  TailParams tails = {};            // read by kernels for shared_kv, or for keys in two tensors
  KeyLists lists = {};              // instead of page tables; read by kernels for shared_kv
  HeadScales q_scales = {};         // read by kernels for 8-bit queries

  /// The factor of the logits of a kv head, to be multiplied with variant.logits_scale.
  FLASHPLAN_HOST_DEVICE float head_scale(int32_t kv_head) const {
    return variant.k_scales.of(kv_head) * q_scales.of(kv_head);
  }
};

}  // namespace flashplan
