// SPDX-License-Identifier: Apache-2.0
#include "api/key_checks.h"

#include <algorithm>

#include "checks/tensor_checks.h"
#include "common/error.h"

namespace flashplan {

int32_t num_pages_of(const AttentionTensors& t) {
  int64_t least = std::min<int64_t>(t.k.shape[0], INT32_MAX);
  for (const TensorView* other : {&t.k_tail, &t.v}) {
    if (!other->empty()) least = std::min(least, other->shape[0]);
  }
  return static_cast<int32_t>(least);
}

Status check_lists(const AttentionTensors& t, const Plan::Impl& plan) {
  const TensorArgument indices{"topk_indices", t.topk_indices};
  const TensorArgument lens{"topk_lens", t.topk_lens};
  const AttentionOptions& options = plan.options;
  for (const TensorArgument& argument : {indices, lens}) {
    if (argument.view.empty()) continue;
    if (options.topk == 0) {
      return error(StatusCode::kInvalidArgument, "%s: expected none without topk, got a tensor",
                   argument.name);
    }
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, DType::kInt32, ""));
    FLASHPLAN_RETURN_IF_ERROR(check_device(argument, options.device));
  }
  if (options.topk == 0) return {};
  if (t.topk_indices.empty()) {
    return error(StatusCode::kInvalidArgument,
                 "topk_indices: expected a tensor with topk, got none");
  }
  const Dim tokens = Dim::at_least(plan.num_tokens);
  FLASHPLAN_RETURN_IF_ERROR(check_shape(indices, {tokens, {1, options.topk}}));
  return t.topk_lens.empty() ? Status() : check_shape(lens, {tokens});
}

Status check_common_tail(const TensorArgument& tail, const Plan::Impl& plan) {
  const AttentionOptions& options = plan.options;
  if (options.page_size > 0) {
    return error(StatusCode::kInvalidArgument,
                 "k_tail: expected none with a paged cache without shared_kv, got a tensor");
  }
  for (const PlanKernel& with : plan.kernels) {
    const Kernel& kernel = with.choice.kernel;
    if (options.device.type == DeviceType::kCpu || kernel.code.key_tails != nullptr) continue;
    return error(StatusCode::kUnsupported, "k_tail: expected none with %s%s, got a tensor",
                 kernel.name.data(), needs_compiler(options) ? " and a variant or rope" : "");
  }
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(tail, options.kv_dtype, " (as planned)"));
  FLASHPLAN_RETURN_IF_ERROR(check_device(tail, options.device));
  return check_shape(tail, {Dim::at_least(plan.num_kv_rows), {1, options.head_dim_qk - 1}});
}

Status check_tail(const TensorArgument& tail, const TensorArgument& whole, DType dtype,
                  const AttentionOptions& options) {
  if (tail.view.empty()) return {};
  const int32_t num_dims = options.head_dim_qk - options.head_dim_vo;
  if (!options.shared_kv || num_dims == 0) {
    return error(StatusCode::kInvalidArgument,
                 "%s: expected none (%s has all dims %s), got a tensor", tail.name, whole.name,
                 options.shared_kv ? "where head_dim_qk is head_dim_vo" : "without shared_kv");
  }
  if (dtype == DType::kFp8DsMla) {
    return error(StatusCode::kInvalidArgument, "%s: expected none with fp8_ds_mla, got a tensor",
                 tail.name);
  }
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(tail, dtype, " (as planned)"));
  return check_device(tail, options.device);
}

Status check_values_given(const AttentionTensors& t, const AttentionOptions& options) {
  if (!options.shared_kv) return {};
  if (!t.v.empty()) {
    return error(StatusCode::kInvalidArgument,
                 "v: expected none with shared_kv, where values are keys, got a tensor");
  }
  if (t.v_scale == 1.0F && t.v_scales.empty()) return {};
  return error(StatusCode::kInvalidArgument,
               "v_scale: expected 1 with shared_kv, where k_scale is that of values too, got %s",
               t.v_scales.empty() ? "another number" : "a tensor");
}

Status check_list_values(const AttentionTensors& t, const Plan::Impl& plan) {
  const TensorView& lists = t.topk_indices;
  const int64_t num_slots = int64_t{num_pages_of(t)} * plan.options.page_size;
  for (int32_t token = 0; token < plan.num_tokens; ++token) {
    const int32_t planned = plan.kv_lens[static_cast<size_t>(token)];
    int64_t count = lists.shape[1];
    if (!t.topk_lens.empty()) {
      count = std::min<int64_t>(count, static_cast<const int32_t*>(t.topk_lens.data)[token]);
    }
    const auto* slots = static_cast<const int32_t*>(lists.data) + token * lists.stride[0];
    for (int64_t i = planned; i < count; ++i) {
      if (slots[i] < 0 || slots[i] >= num_slots) continue;
      return error(StatusCode::kInvalidArgument,
                   "topk_indices[%d, %lld]: expected no key behind the first %d, min(topk, kv_len) "
                   "of plan(), got %d",
                   token, static_cast<long long>(i), planned, slots[i]);
    }
  }
  return {};
}

}  // namespace flashplan
