// SPDX-License-Identifier: Apache-2.0
#include "plan/check_options.h"

#include <cmath>
#include <cstdint>

#include "common/dtypes.h"
#include "common/error.h"
#include "common/kv_layout.h"
#include "plan/rope_turns.h"
#include "variant/variant_impl.h"

namespace flashplan {
namespace {

constexpr int32_t kMaxHeads = 1 << 16;

Status check_at_least(const char* name, int32_t value, int32_t minimum) {
  if (value >= minimum) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected >= %d, got %d", name, minimum, value);
}

Status check_at_most(const char* name, int32_t value, int32_t maximum) {
  if (value <= maximum) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected <= %d, got %d", name, maximum, value);
}

Status check_heads(const AttentionOptions& o) {
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("num_qo_heads", o.num_qo_heads, 1));
  FLASHPLAN_RETURN_IF_ERROR(check_at_most("num_qo_heads", o.num_qo_heads, kMaxHeads));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("num_kv_heads", o.num_kv_heads, 1));
  if (o.num_qo_heads % o.num_kv_heads != 0) {
    return error(StatusCode::kInvalidArgument,
                 "num_qo_heads: expected a multiple of num_kv_heads (%d), got %d", o.num_kv_heads,
                 o.num_qo_heads);
  }
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("head_dim_qk", o.head_dim_qk, 1));
  FLASHPLAN_RETURN_IF_ERROR(check_at_most("head_dim_qk", o.head_dim_qk, kMaxHeadDim));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("head_dim_vo", o.head_dim_vo, 1));
  return check_at_most("head_dim_vo", o.head_dim_vo, kMaxHeadDim);
}

Status check_device(Device device) {
  const bool exists =
      device.type == DeviceType::kCuda || (device.type == DeviceType::kCpu && device.index == 0);
  if (exists) return {};  // select_kernel() checks whether this machine has the GPU
  return error(StatusCode::kInvalidArgument, "device: expected cpu or cuda:<index>, got %s",
               to_string(device).text);
}

Status check_ranges(const AttentionOptions& o) {
  FLASHPLAN_RETURN_IF_ERROR(check_kv_layout(o.kv_layout));
  FLASHPLAN_RETURN_IF_ERROR(check_device(o.device));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("page_size", o.page_size, 0));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("window_left", o.window_left, -1));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("max_batch_size", o.max_batch_size, 1));
  FLASHPLAN_RETURN_IF_ERROR(check_at_most("max_batch_size", o.max_batch_size, 1 << 20));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("max_qo_tokens", o.max_qo_tokens, 1));
  FLASHPLAN_RETURN_IF_ERROR(check_at_most("max_qo_tokens", o.max_qo_tokens, 1 << 24));
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("num_ctas", o.num_ctas, 0));
  FLASHPLAN_RETURN_IF_ERROR(check_at_most("num_ctas", o.num_ctas, kMaxCtas));
  const int64_t max_rows = int64_t{o.max_qo_tokens} * (o.num_qo_heads / o.num_kv_heads);
  if (max_rows > INT32_MAX) {
    return error(StatusCode::kInvalidArgument,
                 "max_qo_tokens: expected max_qo_tokens * group_size <= %d, got %lld", INT32_MAX,
                 static_cast<long long>(max_rows));
  }
  // A subnormal number has few digits, and its inverse overflows, so it is refused.
  if (o.softmax_scale && !(std::isnormal(*o.softmax_scale) && *o.softmax_scale > 0.0F)) {
    return error(StatusCode::kInvalidArgument,
                 "softmax_scale: expected a normal float32 > 0, got %g",
                 static_cast<double>(*o.softmax_scale));
  }
  if (o.softcap != 0.0F && !(std::isnormal(o.softcap) && o.softcap > 0.0F)) {
    return error(StatusCode::kInvalidArgument,
                 "softcap: expected 0 or a normal float32 > 0, got %g",
                 static_cast<double>(o.softcap));
  }
  if (o.kernels < KernelGroup::kAll || o.kernels > KernelGroup::kHopper) {
    return error(StatusCode::kInvalidArgument, "kernels: expected a KernelGroup, got %d",
                 static_cast<int>(o.kernels));
  }
  return {};
}

Status check_dtypes(const AttentionOptions& o) {
  if (!is_float(o.q_dtype)) {
    return error(StatusCode::kUnsupported,
                 "q_dtype: expected float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, got "
                 "%s",
                 to_string(o.q_dtype));
  }
  if (!is_wide_float(o.o_dtype)) {
    return error(StatusCode::kUnsupported, "o_dtype: expected float32, float16 or bfloat16, got %s",
                 to_string(o.o_dtype));
  }
  if (o.kv_dtype == DType::kFp8DsMla) {
    if (o.shared_kv && o.head_dim_qk == kDsMlaDims && o.head_dim_vo == kDsMlaScaledDims) return {};
    return error(StatusCode::kInvalidArgument,
                 "kv_dtype: expected fp8_ds_mla with shared_kv and head dims (%d, %d), got it %s",
                 kDsMlaDims, kDsMlaScaledDims, o.shared_kv ? "with others" : "without shared_kv");
  }
  if (is_narrow_float(o.q_dtype) && !is_narrow_float(o.kv_dtype)) {
    return error(StatusCode::kUnsupported,
                 "kv_dtype: expected float8_e4m3fn or float8_e5m2 with q_dtype %s, got %s",
                 to_string(o.q_dtype), to_string(o.kv_dtype));
  }
  if (o.kv_dtype != o.q_dtype && !is_narrow_float(o.kv_dtype)) {
    return error(StatusCode::kUnsupported,
                 "kv_dtype: expected %s (as q), float8_e4m3fn or float8_e5m2, got %s",
                 to_string(o.q_dtype), to_string(o.kv_dtype));
  }
  return {};
}

Status check_shared_kv(const AttentionOptions& o) {
  if (!o.shared_kv) return {};
  if (o.num_kv_heads != 1) {
    return error(StatusCode::kInvalidArgument, "num_kv_heads: expected 1 with shared_kv, got %d",
                 o.num_kv_heads);
  }
  if (o.head_dim_vo > o.head_dim_qk) {
    return error(StatusCode::kInvalidArgument,
                 "head_dim_vo: expected <= head_dim_qk (%d) with shared_kv, got %d", o.head_dim_qk,
                 o.head_dim_vo);
  }
  if (!o.softmax_scale) {
    return error(StatusCode::kInvalidArgument,
                 "softmax_scale: expected a number with shared_kv, got none");
  }
  if (!o.variant.empty() || o.rope) {
    return error(StatusCode::kInvalidArgument, "%s: expected none with shared_kv, got one",
                 o.rope ? "rope" : "variant");
  }
  return {};
}

Status check_topk(const AttentionOptions& o) {
  FLASHPLAN_RETURN_IF_ERROR(check_at_least("topk", o.topk, 0));
  if (o.topk == 0) return {};
  if (!o.shared_kv || o.page_size == 0) {
    return error(StatusCode::kInvalidArgument, "topk: expected 0 %s, got %d",
                 o.shared_kv ? "with ragged keys" : "without shared_kv", o.topk);
  }
  if (o.window_left < 0 && !o.custom_mask) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected none with topk, got one",
               o.custom_mask ? "custom_mask" : "window_left");
}

Status check_variant(const AttentionOptions& o) {
  const Variant::Impl* variant = o.variant.impl();
  if (variant == nullptr || o.softcap == 0.0F || (!variant->logits && variant->softmax)) return {};
  return error(
      StatusCode::kInvalidArgument,
      "softcap: expected 0 with a variant that has logits of its own or no softmax, got %g",
      static_cast<double>(o.softcap));
}

}  // namespace

Status check_options(const AttentionOptions& options) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_heads(options));
  FLASHPLAN_RETURN_IF_ERROR(check_ranges(options));
  FLASHPLAN_RETURN_IF_ERROR(check_dtypes(options));
  if (options.rope) FLASHPLAN_RETURN_IF_ERROR(check_rope(*options.rope, options.head_dim_qk));
  FLASHPLAN_RETURN_IF_ERROR(check_shared_kv(options));
  FLASHPLAN_RETURN_IF_ERROR(check_topk(options));
  return check_variant(options);
}

}  // namespace flashplan
