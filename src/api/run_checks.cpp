// SPDX-License-Identifier: Apache-2.0
#include "api/run_checks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>

#include "api/key_checks.h"
#include "checks/tensor_checks.h"
#include "common/dtypes.h"
#include "common/error.h"
#include "common/run_tensors.h"
#include "variant/variant_impl.h"

namespace flashplan {
namespace {

/// Checks the shape of k or v. With shared_kv they may leave out the dimension of heads.
Status check_kv(const TensorArgument& argument, const Plan::Impl& plan, int32_t head_dim) {
  const AttentionOptions& options = plan.options;
  const Dim heads = Dim::exactly(options.num_kv_heads);
  const Dim dim = Dim::exactly(head_dim);
  const Dim page = Dim::exactly(options.page_size);
  if (options.page_size == 0) {
    const Dim rows = Dim::at_least(plan.num_kv_rows);
    const bool has_heads = !options.shared_kv || argument.view.rank != 2;
    return has_heads ? check_shape(argument, {rows, heads, dim})
                     : check_shape(argument, {rows, dim});
  }
  if (options.shared_kv && argument.view.rank == 3) {
    return check_shape(argument, {Dim::any(), page, dim});
  }
  return options.kv_layout == KvLayout::kNHD
             ? check_shape(argument, {Dim::any(), page, heads, dim})
             : check_shape(argument, {Dim::any(), heads, page, dim});
}

PageTableTensors tables_of(const AttentionTensors& t) {
  return {t.block_table, t.page_indptr, t.page_indices};
}

bool has_table(const PageTableTensors& tables) {
  return !tables.block_table.empty() || !tables.page_indptr.empty() || !tables.page_indices.empty();
}

/// Checks that the page table has the form that the plan takes, and is on `device`.
Status check_page_form(const PageTableTensors& tables, const Plan::Impl& plan, Device device) {
  if (plan.options.topk > 0 && has_table(tables)) {
    return error(
        StatusCode::kInvalidArgument,
        "block_table: expected no page table with topk, whose lists have the keys, got one");
  }
  if (plan.options.topk > 0) return {};
  if (plan.options.page_size > 0) return check_page_table(tables, plan.batch_size, device);
  if (!has_table(tables)) return {};
  return error(StatusCode::kInvalidArgument,
               "block_table: expected no page table with ragged k and v, got one");
}

/// Checks the real lengths, except their values. They must be on `device`.
Status check_kv_lens(const TensorArgument& kv_lens, const Plan::Impl& plan, Device device) {
  if (kv_lens.view.empty()) return {};
  if (plan.options.topk > 0) {
    return error(StatusCode::kInvalidArgument,
                 "kv_lens: expected none with topk, whose lengths are topk_lens, got a tensor");
  }
  if (plan.has_key_ranges) {
    return error(StatusCode::kInvalidArgument,
                 "kv_lens: expected none with key ranges, which belong to the planned lengths, got "
                 "a tensor");
  }
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(kv_lens, DType::kInt32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(kv_lens, device));
  return check_shape(kv_lens, {Dim::at_least(plan.batch_size)});
}

Status check_mask(const AttentionTensors& t, const Plan::Impl& plan) {
  const bool wanted = plan.options.custom_mask;
  if (wanted == t.mask.empty()) {
    return error(StatusCode::kInvalidArgument, "mask: expected %s custom_mask, got %s",
                 wanted ? "a tensor with" : "none without", wanted ? "none" : "one");
  }
  if (!wanted) return {};
  const TensorArgument mask{"mask", t.mask};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(mask, DType::kUInt32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(mask, plan.options.device));
  const int64_t num_words = (plan.num_mask_bits + 31) / 32;
  return check_shape(mask, {Dim::at_least(plan.num_tokens), Dim::at_least(num_words)});
}

Status check_sinks(const AttentionTensors& t, const Plan::Impl& plan) {
  if (t.sinks.empty()) return {};
  const TensorArgument sinks{"sinks", t.sinks};
  if (t.sinks.dtype != DType::kBFloat16) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(sinks, DType::kFloat32, " or bfloat16"));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_device(sinks, plan.options.device));
  return check_shape(sinks, {Dim::exactly(plan.options.num_qo_heads)});
}

/// Checks a tensor of the variant. It may have any shape but no gaps, since bodies get a pointer.
Status check_variant_tensor(const TensorArgument& argument, DType dtype, Device device) {
  const int32_t rank = argument.view.rank;
  if (rank < 1 || rank > kMaxRank) {  // check_shape() does this for other tensors
    return error(StatusCode::kInvalidArgument, "%s: expected 1 to %d dimensions, got %d",
                 argument.name, kMaxRank, rank);
  }
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, dtype, " (of the variant)"));
  FLASHPLAN_RETURN_IF_ERROR(check_device(argument, device));
  FLASHPLAN_RETURN_IF_ERROR(check_memory(argument));
  int64_t stride = 1;
  for (int32_t d = rank - 1; d >= 0; --d) {
    if (argument.view.shape[d] > 1 && argument.view.stride[d] != stride) {
      return error(StatusCode::kInvalidArgument,
                   "%s: expected a contiguous tensor, got stride %lld in dimension %d",
                   argument.name, static_cast<long long>(argument.view.stride[d]), d);
    }
    stride *= argument.view.shape[d];
  }
  return {};
}

Status check_variant_arguments(const AttentionTensors& t, const Plan::Impl& plan) {
  const Variant::Impl* variant = plan.options.variant.impl();
  const auto check_count = [](const char* what, int32_t count, std::size_t expected) -> Status {
    if (count == static_cast<int32_t>(expected)) return {};
    return error(StatusCode::kInvalidArgument,
                 "%s: expected %zu (as many as the variant has), got %d", what, expected, count);
  };
  FLASHPLAN_RETURN_IF_ERROR(check_count("variant_tensors", t.num_variant_tensors,
                                        variant != nullptr ? variant->tensors.size() : 0));
  if (t.variant_scalars != nullptr) {
    FLASHPLAN_RETURN_IF_ERROR(check_count("variant_scalars", t.num_variant_scalars,
                                          variant != nullptr ? variant->scalars.size() : 0));
  }
  if (t.num_variant_tensors > 0 && t.variant_tensors == nullptr) {
    return error(StatusCode::kInvalidArgument, "variant_tensors: expected %d, got a null pointer",
                 t.num_variant_tensors);
  }
  for (int32_t i = 0; i < t.num_variant_tensors; ++i) {
    const Variant::Impl::Tensor& expected = variant->tensors[static_cast<size_t>(i)];
    const TensorArgument argument{expected.name.c_str(), t.variant_tensors[i]};
    FLASHPLAN_RETURN_IF_ERROR(check_variant_tensor(argument, expected.dtype, plan.options.device));
  }
  const bool has_softmax = variant == nullptr || variant->softmax;
  for (const TensorArgument& argument : {TensorArgument{"lse", t.lse}, {"sinks", t.sinks}}) {
    if (has_softmax || argument.view.empty()) continue;
    return error(StatusCode::kInvalidArgument,
                 "%s: expected none with a variant without softmax, got a tensor", argument.name);
  }
  return {};
}

template <std::size_t... kIndex>
std::array<TensorArgument, kNumRunTensors + 1> arguments_of(const AttentionTensors& t,
                                                            const TensorView& workspace,
                                                            std::index_sequence<kIndex...>) {
  return {
      {{kRunTensors[kIndex].name, t.*kRunTensors[kIndex].view, kRunTensors[kIndex].is_written()}...,
       {"workspace", workspace, true}}};
}

/// Checks that the written ones among `arguments` share no memory with the variant's tensors.
Status check_variant_apart(const AttentionTensors& t, const Plan::Impl& plan,
                           std::span<const TensorArgument> arguments) {
  for (int32_t i = 0; i < t.num_variant_tensors; ++i) {
    const auto& tensor = plan.options.variant.impl()->tensors[static_cast<size_t>(i)];
    const TensorArgument argument{tensor.name.c_str(), t.variant_tensors[i]};
    for (const TensorArgument& other : arguments) {
      if (!other.written || other.view.empty()) continue;
      FLASHPLAN_RETURN_IF_ERROR(check_apart(other, argument));
    }
  }
  return {};
}

/// The length of a request: the real one if it is given, else the planned one.
int32_t kv_len_of(const TensorView& kv_lens, const Plan::Impl& plan, int32_t request) {
  const int32_t planned = plan.kv_lens[static_cast<size_t>(request)];
  if (kv_lens.empty()) return planned;
  return std::clamp(static_cast<const int32_t*>(kv_lens.data)[request], 0, planned);
}

/// Checks that no real length is shorter than the request's shared prefix and queries together.
Status check_prefix_lens(const TensorView& kv_lens, const Plan::Impl& plan) {
  if (kv_lens.empty()) return {};
  for (const PrefixGroup& group : plan.prefixes.in_order()) {
    for (int32_t r = group.first_request; r < group.first_request + group.num_requests; ++r) {
      const int32_t qo_len = plan.schedule().segments[static_cast<std::size_t>(r)].qo_len;
      if (qo_len == 0 || kv_len_of(kv_lens, plan, r) >= group.num_tokens + qo_len) continue;
      return error(StatusCode::kInvalidArgument,
                   "kv_lens[%d]: expected >= %d, the keys of shared_prefixes[%d] and %d tokens, "
                   "got %d",
                   r, group.num_tokens + qo_len, group.row, qo_len, kv_len_of(kv_lens, plan, r));
    }
  }
  return {};
}

/// Checks the page ids in a table, but only of pages that a query sees. Pages before a sliding
/// window may have any id.
Status check_pages(const PageTableTensors& tables, const TensorView& kv_lens, int32_t num_pages,
                   const Plan::Impl& plan) {
  const AttentionOptions& options = plan.options;
  const Mask mask = {options.causal, options.window_left};
  for (int32_t r = 0; r < plan.batch_size; ++r) {
    const int32_t kv_len = kv_len_of(kv_lens, plan, r);
    const int32_t qo_len = plan.schedule().segments[static_cast<std::size_t>(r)].qo_len;
    const int32_t first = qo_len == 0 ? kv_len : mask.visible(kv_len - qo_len, {0, kv_len}).begin;
    FLASHPLAN_RETURN_IF_ERROR(
        check_page_ids(tables, r, first, kv_len, options.page_size, num_pages));
  }
  return {};
}

/// Checks a scale of keys or queries, its product with `factor`, and this product divided by
/// softcap. `factor`: softmax_scale times the scale of the other tensor, q or k. `others`: the name
/// of this other scale in messages.
Status check_logits_scale(const char* name, float scale, const char* others, float factor,
                          const AttentionOptions& options) {
  FLASHPLAN_RETURN_IF_ERROR(check_scale(name, scale));
  const float logits_scale = factor * scale;
  if (!std::isnormal(logits_scale)) {
    return error(StatusCode::kInvalidArgument,
                 "%s: expected a normal float32 as product with softmax_scale * %s (%g), got %g",
                 name, others, static_cast<double>(factor), static_cast<double>(scale));
  }
  if (options.softcap > 0.0F && !std::isfinite(logits_scale / options.softcap)) {
    return error(
        StatusCode::kInvalidArgument,
        "%s: expected a finite product with softmax_scale * %s / softcap (%g / %g), got %g", name,
        others, static_cast<double>(factor), static_cast<double>(options.softcap),
        static_cast<double>(scale));
  }
  return {};
}

/// Checks the scales that are numbers. check_head_scale_values() checks those in tensors.
Status check_scale_numbers(const AttentionTensors& t, const AttentionOptions& options) {
  if (!is_narrow_float(options.q_dtype) && (t.q_scale != 1.0F || !t.q_scales.empty())) {
    return error(StatusCode::kInvalidArgument, "q_scale: expected 1 with q of %s, got %s",
                 to_string(options.q_dtype), t.q_scales.empty() ? "another number" : "a tensor");
  }
  FLASHPLAN_RETURN_IF_ERROR(check_scale("q_scale", t.q_scale));
  FLASHPLAN_RETURN_IF_ERROR(check_logits_scale("k_scale", t.k_scale, "q_scale",
                                               *options.softmax_scale * t.q_scale, options));
  return check_scale("v_scale", t.v_scale);
}

/// Checks the products of the scales of kv heads with the numbers q_scale, k_scale and v_scale.
Status check_head_scale_values(const AttentionTensors& t, const AttentionOptions& options) {
  const float softmax_scale = *options.softmax_scale;
  const HeadScales q_scales = head_scales(t.q_scales);
  const HeadScales k_scales = head_scales(t.k_scales);
  int32_t head = 0;
  FLASHPLAN_RETURN_IF_ERROR(
      check_entries("q_scale", t.q_scales, [&](const char* entry, float scale) {
        const float factor = softmax_scale * t.k_scale * k_scales.of(head++);
        return check_logits_scale(entry, t.q_scale * scale, "k_scale", factor, options);
      }));
  head = 0;
  FLASHPLAN_RETURN_IF_ERROR(
      check_entries("k_scale", t.k_scales, [&](const char* entry, float scale) {
        const float factor = softmax_scale * t.q_scale * q_scales.of(head++);
        return check_logits_scale(entry, t.k_scale * scale, "q_scale", factor, options);
      }));
  return check_scales("v_scale", t.v_scale, t.v_scales);
}

/// Checks that no real length is negative or above the planned one. Instead of such a length run()
/// takes 0 or the planned one, without an error.
Status check_real_lens(const TensorView& kv_lens, const Plan::Impl& plan) {
  for (int32_t r = 0; !kv_lens.empty() && r < plan.batch_size; ++r) {
    const int32_t kv_len = static_cast<const int32_t*>(kv_lens.data)[r];
    const int32_t planned = plan.kv_lens[static_cast<size_t>(r)];
    if (kv_len >= 0 && kv_len <= planned) continue;
    return error(StatusCode::kInvalidArgument,
                 "kv_lens[%d]: expected a length in [0, %d], the planned one, got %d", r, planned,
                 kv_len);
  }
  return {};
}

Status check_workspace(const AttentionTensors& t, const Plan::Impl& plan) {
  const std::size_t wanted = *plan.options.workspace_bytes;
  if (wanted == 0) return {};
  if (t.workspace == nullptr) {
    return error(StatusCode::kInvalidArgument, "workspace: expected %zu bytes, got null", wanted);
  }
  if (t.workspace_bytes < wanted) {
    return error(StatusCode::kInvalidArgument, "workspace: expected >= %zu bytes, got %zu", wanted,
                 t.workspace_bytes);
  }
  if (reinterpret_cast<uintptr_t>(t.workspace) % kWorkspaceAlignment != 0) {
    return error(StatusCode::kInvalidArgument, "workspace: expected a multiple of %zu, got %p",
                 kWorkspaceAlignment, t.workspace);
  }
  return {};
}

}  // namespace

Status check_tensors(const AttentionTensors& t, const Plan::Impl& plan) {
  const AttentionOptions& options = plan.options;
  const TensorArgument q{"q", t.q};
  const TensorArgument q_tail{"q_tail", t.q_tail};
  const TensorArgument k{"k", t.k};
  const TensorArgument k_tail{"k_tail", t.k_tail};
  const TensorArgument v{"v", options.shared_kv ? t.k : t.v};
  const TensorArgument o{"out", t.o, true};
  const TensorArgument lse{"lse", t.lse, true};
  FLASHPLAN_RETURN_IF_ERROR(check_values_given(t, options));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(q, options.q_dtype, " (as planned)"));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(k, options.kv_dtype, " (as planned)"));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(v, options.kv_dtype, " (as planned)"));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(o, options.o_dtype, " (as planned)"));
  for (const TensorArgument* argument : {&q, &k, &v, &o}) {
    FLASHPLAN_RETURN_IF_ERROR(check_device(*argument, options.device));
  }
  const Dim tokens = Dim::at_least(plan.num_tokens);
  const Dim heads = Dim::exactly(options.num_qo_heads);
  FLASHPLAN_RETURN_IF_ERROR(check_tail(q_tail, q, options.q_dtype, options));
  const bool has_common_tail = !t.k_tail.empty() && !options.shared_kv;
  FLASHPLAN_RETURN_IF_ERROR(has_common_tail ? check_common_tail(k_tail, plan)
                                            : check_tail(k_tail, k, options.kv_dtype, options));
  const int32_t tail_dims = options.head_dim_qk - options.head_dim_vo;
  const int32_t q_dims = t.q_tail.empty() ? options.head_dim_qk : options.head_dim_vo;
  const bool has_rows_of_bytes = options.kv_dtype == DType::kFp8DsMla;
  const int32_t all_dims = has_rows_of_bytes ? kDsMlaBytes : options.head_dim_qk;
  const auto common_dims = static_cast<int32_t>(has_common_tail ? t.k_tail.shape[1] : 0);
  const int32_t k_dims =
      t.k_tail.empty() || has_common_tail ? all_dims - common_dims : options.head_dim_vo;
  FLASHPLAN_RETURN_IF_ERROR(check_shape(q, {tokens, heads, Dim::exactly(q_dims)}));
  if (!t.q_tail.empty()) {
    FLASHPLAN_RETURN_IF_ERROR(check_shape(q_tail, {tokens, heads, Dim::exactly(tail_dims)}));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_shape(o, {tokens, heads, Dim::exactly(options.head_dim_vo)}));
  FLASHPLAN_RETURN_IF_ERROR(check_kv(k, plan, k_dims));
  if (!t.k_tail.empty() && options.shared_kv) {
    FLASHPLAN_RETURN_IF_ERROR(check_kv(k_tail, plan, tail_dims));
  }
  if (!options.shared_kv) FLASHPLAN_RETURN_IF_ERROR(check_kv(v, plan, options.head_dim_vo));
  if (!t.lse.empty()) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(lse, DType::kFloat32, ""));
    FLASHPLAN_RETURN_IF_ERROR(check_device(lse, options.device));
    FLASHPLAN_RETURN_IF_ERROR(check_shape(lse, {tokens, heads}));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_page_form(tables_of(t), plan, options.device));
  FLASHPLAN_RETURN_IF_ERROR(check_kv_lens({"kv_lens", t.kv_lens}, plan, options.device));
  FLASHPLAN_RETURN_IF_ERROR(check_lists(t, plan));
  FLASHPLAN_RETURN_IF_ERROR(check_mask(t, plan));
  FLASHPLAN_RETURN_IF_ERROR(check_sinks(t, plan));
  FLASHPLAN_RETURN_IF_ERROR(check_variant_arguments(t, plan));
  for (const TensorArgument& scales :
       {TensorArgument{"q_scale", t.q_scales}, {"k_scale", t.k_scales}, {"v_scale", t.v_scales}}) {
    FLASHPLAN_RETURN_IF_ERROR(check_head_scales(scales, options.num_kv_heads, options.device));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_scale_numbers(t, options));
  FLASHPLAN_RETURN_IF_ERROR(check_workspace(t, plan));
  const TensorView workspace = bytes_view(t.workspace, *options.workspace_bytes, options.device);
  const auto arguments = arguments_of(t, workspace, std::make_index_sequence<kNumRunTensors>());
  static_assert(arguments.size() <= kMostArguments);
  FLASHPLAN_RETURN_IF_ERROR(check_apart(arguments));
  return check_variant_apart(t, plan, arguments);
}

Status check_values(const AttentionTensors& t, const Plan::Impl& plan) {
  FLASHPLAN_RETURN_IF_ERROR(check_head_scale_values(t, plan.options));
  FLASHPLAN_RETURN_IF_ERROR(check_prefix_lens(t.kv_lens, plan));
  if (plan.options.page_size == 0) return {};
  if (plan.options.topk > 0) return check_list_values(t, plan);
  return check_pages(tables_of(t), t.kv_lens, num_pages_of(t), plan);
}

Status check_data(const DeviceData& data, const Plan::Impl& plan) {
  const Device host;
  const int32_t page_size = plan.options.page_size;
  const PageTableTensors tables{data.block_table, data.page_indptr, data.page_indices};
  const TensorArgument slots{"slot_mapping", data.slot_mapping};
  if (data.num_pages < 0) {
    return error(StatusCode::kInvalidArgument, "num_pages: expected >= 0, got %lld",
                 static_cast<long long>(data.num_pages));
  }
  const auto num_pages = static_cast<int32_t>(std::min<int64_t>(data.num_pages, INT32_MAX));
  if (page_size == 0 && !slots.view.empty()) {
    return error(StatusCode::kInvalidArgument,
                 "slot_mapping: expected none with ragged k and v, got a tensor");
  }
  const bool needs_table = slots.view.empty() && data.kv_lens.empty();
  if (needs_table || has_table(tables)) {
    FLASHPLAN_RETURN_IF_ERROR(check_page_form(tables, plan, host));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_kv_lens({"kv_lens", data.kv_lens}, plan, host));
  FLASHPLAN_RETURN_IF_ERROR(check_real_lens(data.kv_lens, plan));
  FLASHPLAN_RETURN_IF_ERROR(check_prefix_lens(data.kv_lens, plan));
  if (has_table(tables)) {
    FLASHPLAN_RETURN_IF_ERROR(check_pages(tables, data.kv_lens, num_pages, plan));
  }
  if (slots.view.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(slots, DType::kInt64, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(slots, host));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(slots, {Dim::any()}));
  return check_slots(slots.view, page_size, num_pages);
}

Status check_planned_columns(const AttentionTensors& t, const Plan::Impl& plan) {
  if (plan.options.page_size == 0 || plan.options.topk > 0 || t.block_table.empty() ||
      plan.kv_lens.empty())
    return {};
  const int32_t kv_len = plan.kv_lens[static_cast<size_t>(plan.longest_request)];
  return check_columns(t.block_table, plan.longest_request, kv_len, plan.options.page_size);
}

}  // namespace flashplan
