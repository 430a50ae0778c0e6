// SPDX-License-Identifier: Apache-2.0
#include "api/tensor_checks.h"
#include "common/error.h"
#include "common/kv_layout.h"
#include "flashplan/kv_cache.h"
#include "ops/checks.h"
#include "ops/operators.h"

namespace flashplan {
namespace {

/// Rows are stored as they are, or narrowed to an 8-bit float.
Status check_rows_dtype(const TensorArgument& rows, const TensorArgument& cache) {
  const DType stored = cache.view.dtype;
  if (!is_narrow(stored) && !is_wide(stored)) {
    return error(StatusCode::kInvalidType, "%s: expected a float dtype, got %s", cache.name,
                 to_string(stored));
  }
  if (!is_narrow(stored)) {
    return rows.view.dtype == stored
               ? Status()
               : error(StatusCode::kInvalidType, "%s: expected dtype %s (as %s), got %s", rows.name,
                       to_string(stored), cache.name, to_string(rows.view.dtype));
  }
  if (rows.view.dtype == stored || is_wide(rows.view.dtype)) return {};
  return error(StatusCode::kInvalidType, "%s: expected %s, float32, float16 or bfloat16, got %s",
               rows.name, to_string(stored), to_string(rows.view.dtype));
}

Status check_index(const TensorArgument& argument, Dim size, Device device) {
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, DType::kInt32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(argument, device));
  return check_shape(argument, {size});
}

/// A token's elements are counted in 32 bits, those of k and of v together.
Status check_row_size(const AppendTensors& t) {
  const int64_t head_dims = t.k.shape[2] + t.v.shape[2];
  if (t.k.shape[1] == 0 || head_dims <= INT32_MAX / t.k.shape[1]) return {};
  return error(StatusCode::kInvalidArgument,
               "k: expected <= %d elements of k and v in a token, got %lld heads of %lld",
               INT32_MAX, static_cast<long long>(t.k.shape[1]), static_cast<long long>(head_dims));
}

/// The values of host index tensors.
Status check_indices(const AppendTensors& t, int32_t page_size, int64_t num_pages) {
  const PageTableTensors tables{t.block_table, t.page_indptr, t.page_indices};
  const auto* indptr = static_cast<const int32_t*>(t.indptr.data);
  const auto* kv_lens = static_cast<const int32_t*>(t.kv_lens.data);
  const auto batch_size = static_cast<int32_t>(t.kv_lens.shape[0]);
  if (indptr[0] < 0) {
    return error(StatusCode::kInvalidArgument, "indptr[0]: expected >= 0, got %d", indptr[0]);
  }
  for (int32_t r = 0; r < batch_size; ++r) {
    if (indptr[r + 1] < indptr[r]) {
      return error(StatusCode::kInvalidArgument, "indptr[%d]: expected >= indptr[%d] (%d), got %d",
                   r + 1, r, indptr[r], indptr[r + 1]);
    }
    if (kv_lens[r] < indptr[r + 1] - indptr[r]) {
      return error(StatusCode::kInvalidArgument,
                   "kv_lens[%d]: expected >= %d (the new tokens included), got %d", r,
                   indptr[r + 1] - indptr[r], kv_lens[r]);
    }
    FLASHPLAN_RETURN_IF_ERROR(check_page_ids(tables, r, kv_lens[r], page_size, num_pages));
  }
  for (const TensorArgument& rows : {TensorArgument{"k", t.k}, TensorArgument{"v", t.v}}) {
    if (rows.view.shape[0] >= indptr[batch_size]) continue;
    return error(StatusCode::kInvalidArgument, "%s: expected >= %d rows (indptr[%d]), got %lld",
                 rows.name, indptr[batch_size], batch_size,
                 static_cast<long long>(rows.view.shape[0]));
  }
  return {};
}

}  // namespace

Status append_paged_kv(const AppendTensors& t, Stream stream) noexcept {
  const Device device = t.k_cache.device;
  const TensorArgument k{"k", t.k};
  const TensorArgument v{"v", t.v};
  const TensorArgument k_cache{"k_cache", t.k_cache, true};
  const TensorArgument v_cache{"v_cache", t.v_cache, true};
  const TensorArgument indptr{"indptr", t.indptr};
  const TensorArgument kv_lens{"kv_lens", t.kv_lens};
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(k_cache));
  for (const TensorArgument* argument : {&k, &v, &v_cache}) {
    FLASHPLAN_RETURN_IF_ERROR(check_device(*argument, device));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_rows_dtype(k, k_cache));
  FLASHPLAN_RETURN_IF_ERROR(check_rows_dtype(v, v_cache));

  FLASHPLAN_RETURN_IF_ERROR(check_kv_layout(t.layout));
  const bool nhd = t.layout == KvLayout::kNHD;
  const auto check_cache = [&](const TensorArgument& cache, Dim slots, Dim heads) {
    return nhd ? check_shape(cache, {Dim::any(), slots, heads, Dim::int32()})
               : check_shape(cache, {Dim::any(), heads, slots, Dim::int32()});
  };
  FLASHPLAN_RETURN_IF_ERROR(check_cache(k_cache, Dim::int32(1), Dim::int32()));
  const auto page_size = static_cast<int32_t>(t.k_cache.shape[nhd ? 1 : 2]);
  const Dim heads = Dim::exactly(t.k_cache.shape[nhd ? 2 : 1]);
  FLASHPLAN_RETURN_IF_ERROR(check_cache(v_cache, Dim::exactly(page_size), heads));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(k, {Dim::any(), heads, Dim::exactly(t.k_cache.shape[3])}));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(v, {Dim::any(), heads, Dim::exactly(t.v_cache.shape[3])}));
  FLASHPLAN_RETURN_IF_ERROR(check_row_size(t));
  FLASHPLAN_RETURN_IF_ERROR(check_scale("k_scale", t.k_scale));
  FLASHPLAN_RETURN_IF_ERROR(check_scale("v_scale", t.v_scale));

  FLASHPLAN_RETURN_IF_ERROR(check_index(kv_lens, {0, INT32_MAX - 1}, device));
  const auto batch_size = static_cast<int32_t>(t.kv_lens.shape[0]);
  FLASHPLAN_RETURN_IF_ERROR(check_index(indptr, Dim::exactly(batch_size + 1), device));
  FLASHPLAN_RETURN_IF_ERROR(
      check_page_table({t.block_table, t.page_indptr, t.page_indices}, batch_size, device));
  const TensorArgument arguments[] = {k_cache,
                                      v_cache,
                                      k,
                                      v,
                                      indptr,
                                      kv_lens,
                                      {"block_table", t.block_table},
                                      {"page_indptr", t.page_indptr},
                                      {"page_indices", t.page_indices}};
  FLASHPLAN_RETURN_IF_ERROR(check_apart(arguments));
  if (device.type == DeviceType::kCuda) return cuda::append_paged_kv(t, stream);
  const int64_t num_pages =
      t.k_cache.shape[0] < t.v_cache.shape[0] ? t.k_cache.shape[0] : t.v_cache.shape[0];
  FLASHPLAN_RETURN_IF_ERROR(check_indices(t, page_size, num_pages));
  cpu::append_paged_kv(t);
  return {};
}

}  // namespace flashplan
