// SPDX-License-Identifier: Apache-2.0
// The argument of every attention kernel: plain data, passed by value on a GPU. Strides in
// elements.
#pragma once

#include <cstdint>

#include "abi/divisor.h"
#include "abi/kv_view.h"
#include "abi/work_queue.h"
#include "flashplan/tensor.h"

namespace flashplan {

struct AttentionParams {
  // What a GPU kernel reads first: constants come from memory, a line at a time.
  const QueueStart* starts;  // [num_ctas] (GPU kernels)
  int32_t tile_q;
  Divisor group_size;  // query heads of a kv head
  int32_t chunk_kv;    // 0: one state per work tile
  PageTable pages;
  const RequestInfo* requests;
  const WorkTile* tiles;

  const void* q;  // [num_tokens, num_qo_heads, head_dim_qk]
  int64_t q_token_stride;
  int64_t q_head_stride;
  KvView k;
  KvView v;
  void* o;  // [num_tokens, num_qo_heads, head_dim_vo]
  int64_t o_token_stride;
  int64_t o_head_stride;
  float* lse;  // [num_tokens, num_qo_heads], or null
  int64_t lse_token_stride;
  int64_t lse_head_stride;

  DType q_dtype;
  DType kv_dtype;
  DType o_dtype;
  bool vectorized;  // q, k, v and o can be read and written 16 bytes at a time (GPU kernels)
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  bool has_few_rows;  // packed, per request, on average: the smallest tile holds them (GPU kernels)
  bool causal;
  int32_t window_left;  // -1: unbounded
  float logits_scale;   // softmax_scale * k_scale
  float softcap;        // 0: off
  float v_scale;

  // The schedule; see plan/schedule.h. On the device of the tensors.
  const int32_t* cta_indptr;  // [num_ctas + 1] (cpu)
  const SplitTile* splits;
  int32_t num_splits;
  int32_t num_ctas;
  int32_t tile_kv;
  int64_t total_cost;  // of the schedule, in its units

  // The workspace; see plan/workspace_layout.h.
  int32_t* arrivals;
  void* scratch;          // [num_ctas, scratch_bytes]: private to a queue or worker
  int64_t scratch_bytes;  // a multiple of 16
  float* partial_o;
  float* partial_lse;
};

}  // namespace flashplan
