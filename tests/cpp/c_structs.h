// SPDX-License-Identifier: Apache-2.0
// Makes the structs of flashplan_c.h from those of the C++ library.
#pragma once

#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <string>

#include "check.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c.h"

namespace flashplan::test {

struct Destroy {
  void operator()(flashplan_plan* plan) const { flashplan_plan_destroy(plan); }
};
using CPlan = std::unique_ptr<flashplan_plan, Destroy>;

/// Message of a call; full of what must be overwritten before it.
struct Message {
  char text[FLASHPLAN_MESSAGE_SIZE];
  Message() { std::memset(text, 'x', sizeof(text)); }
  operator char*() { return text; }
};

inline Status as_status(flashplan_status code, const Message& message) {
  Status status;
  status.code = static_cast<StatusCode>(code);
  std::memcpy(status.message, message.text, sizeof(status.message));
  return status;
}

/// A struct that its init function has set. All of its bytes were set before, so that a byte that
/// the function leaves out is seen.
template <typename T>
T started(void (*init)(T*, size_t)) {
  T t;
  std::memset(&t, 0xff, sizeof(t));
  init(&t, sizeof(t));
  return t;
}

inline flashplan_options c_options(const AttentionOptions& o) {
  auto c = started(flashplan_options_init);
  c.num_qo_heads = o.num_qo_heads;
  c.num_kv_heads = o.num_kv_heads;
  c.head_dim_qk = o.head_dim_qk;
  c.head_dim_vo = o.head_dim_vo;
  c.page_size = o.page_size;
  c.kv_layout = static_cast<int32_t>(o.kv_layout);
  c.q_dtype = static_cast<int32_t>(o.q_dtype);
  c.kv_dtype = static_cast<int32_t>(o.kv_dtype);
  c.o_dtype = static_cast<int32_t>(o.o_dtype);
  c.causal = o.causal ? 1 : 0;
  c.window_left = o.window_left;
  c.custom_mask = o.custom_mask ? 1 : 0;
  c.softmax_scale = o.softmax_scale.value_or(0.0F);
  c.softcap = o.softcap;
  c.max_batch_size = o.max_batch_size;
  c.max_qo_tokens = o.max_qo_tokens;
  c.num_ctas = o.num_ctas;
  c.batch_invariant = o.batch_invariant ? 1 : 0;
  c.workspace_bytes = o.workspace_bytes.value_or(0);
  c.shared_kv = o.shared_kv ? 1 : 0;
  c.topk = o.topk;
  return c;
}

inline flashplan_batch c_batch(const Batch& b) {
  auto c = started(flashplan_batch_init);
  c.qo_indptr = b.qo_indptr;
  c.kv_lens = b.kv_lens;
  c.kv_indptr = b.kv_indptr;
  c.shared_prefixes = b.shared_prefixes;
  c.mask_begin = b.mask_begin;
  c.batch_size = b.batch_size;
  c.num_shared_prefixes = b.num_shared_prefixes;
  return c;
}

/// Owns the C tensors of a call.
class CTensors {
 public:
  /// Null for a tensor that is not given.
  const flashplan_tensor* add(const TensorView& view) {
    if (view.empty()) return nullptr;
    flashplan_tensor& t = tensors_.emplace_back();
    std::memset(&t, 0xff, sizeof(t));
    flashplan_tensor_init(&t, sizeof(t), view.data, static_cast<int32_t>(view.dtype), view.rank,
                          view.shape);
    t.device_type = static_cast<int32_t>(view.device.type);
    t.device_index = view.device.index;
    std::copy_n(view.stride, kMaxRank, t.stride);
    t.read_only = view.read_only ? 1 : 0;
    return &t;
  }

 private:
  std::list<flashplan_tensor> tensors_;
};

inline flashplan_attention_tensors c_tensors(const AttentionTensors& t, CTensors& owner) {
  auto c = started(flashplan_attention_tensors_init);
  c.q = owner.add(t.q);
  c.k = owner.add(t.k);
  c.v = owner.add(t.v);
  c.block_table = owner.add(t.block_table);
  c.page_indptr = owner.add(t.page_indptr);
  c.page_indices = owner.add(t.page_indices);
  c.kv_lens = owner.add(t.kv_lens);
  c.mask = owner.add(t.mask);
  c.sinks = owner.add(t.sinks);
  c.q_tail = owner.add(t.q_tail);
  c.k_tail = owner.add(t.k_tail);
  c.topk_indices = owner.add(t.topk_indices);
  c.topk_lens = owner.add(t.topk_lens);
  c.q_scales = owner.add(t.q_scales);
  c.k_scales = owner.add(t.k_scales);
  c.v_scales = owner.add(t.v_scales);
  c.out = owner.add(t.o);
  c.lse = owner.add(t.lse);
  c.q_scale = t.q_scale;
  c.k_scale = t.k_scale;
  c.v_scale = t.v_scale;
  c.workspace = t.workspace;
  c.workspace_bytes = t.workspace_bytes;
  c.pdl = t.pdl ? 1 : 0;
  return c;
}

inline flashplan_append_tensors c_append(const AppendTensors& t, CTensors& owner) {
  auto c = started(flashplan_append_tensors_init);
  c.k = owner.add(t.k);
  c.v = owner.add(t.v);
  c.k_cache = owner.add(t.k_cache);
  c.v_cache = owner.add(t.v_cache);
  c.indptr = owner.add(t.indptr);
  c.kv_lens = owner.add(t.kv_lens);
  c.block_table = owner.add(t.block_table);
  c.page_indptr = owner.add(t.page_indptr);
  c.page_indices = owner.add(t.page_indices);
  c.slot_mapping = owner.add(t.slot_mapping);
  c.k_scales = owner.add(t.k_scales);
  c.v_scales = owner.add(t.v_scales);
  c.k_scale = t.k_scale;
  c.v_scale = t.v_scale;
  c.kv_layout = static_cast<int32_t>(t.layout);
  return c;
}

inline CPlan create(const flashplan_options& options) {
  flashplan_plan* plan = nullptr;
  Message message;
  CHECK_EQ(flashplan_plan_create(&options, &plan, message), FLASHPLAN_OK);
  CHECK_EQ(std::string(message), "");
  return CPlan(plan);
}

}  // namespace flashplan::test
