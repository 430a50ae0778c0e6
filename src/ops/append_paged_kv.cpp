// SPDX-License-Identifier: Apache-2.0
#include "ops/append_checks.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "checks/tensor_checks.h"
#include "common/dtypes.h"
#include "common/error.h"
#include "common/kv_layout.h"
#include "ops/checks.h"
#include "ops/operators.h"

namespace flashplan {
namespace {

/// Checks that rows are stored as they are, or narrowed to an 8-bit float.
Status check_rows_dtype(const TensorArgument& rows, const TensorArgument& cache) {
  const DType stored = cache.view.dtype;
  if (!is_narrow_float(stored) && !is_wide_float(stored)) {
    return error(StatusCode::kInvalidType, "%s: expected a float dtype, got %s", cache.name,
                 to_string(stored));
  }
  if (!is_narrow_float(stored)) {
    return rows.view.dtype == stored
               ? Status()
               : error(StatusCode::kInvalidType, "%s: expected dtype %s (as %s), got %s", rows.name,
                       to_string(stored), cache.name, to_string(rows.view.dtype));
  }
  if (rows.view.dtype == stored || is_wide_float(rows.view.dtype)) return {};
  return error(StatusCode::kInvalidType, "%s: expected %s, float32, float16 or bfloat16, got %s",
               rows.name, to_string(stored), to_string(rows.view.dtype));
}

Status check_index(const TensorArgument& argument, Dim size, Device device) {
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, DType::kInt32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(argument, device));
  return check_shape(argument, {size});
}

/// Checks that the elements of k and v in a token can be counted in 32 bits.
Status check_row_size(const AppendTensors& t) {
  const int64_t head_dims = t.k.shape[2] + t.v.shape[2];
  if (t.k.shape[1] == 0 || head_dims <= INT32_MAX / t.k.shape[1]) return {};
  return error(StatusCode::kInvalidArgument,
               "k: expected <= %d elements of k and v in a token, got %lld heads of %lld",
               INT32_MAX, static_cast<long long>(t.k.shape[1]), static_cast<long long>(head_dims));
}

/// The dimension of a cache that counts the tokens of a page.
int page_dimension(KvLayout layout) { return layout == KvLayout::kNHD ? 1 : 2; }

int32_t page_size_of(const AppendTensors& t) {
  return static_cast<int32_t>(t.k_cache.shape[page_dimension(t.layout)]);
}

/// Refuses `others`, which must not be given together with the tensor named `given`.
Status check_alone(const char* given, std::initializer_list<TensorArgument> others) {
  for (const TensorArgument& other : others) {
    if (other.view.empty()) continue;
    return error(StatusCode::kInvalidArgument, "%s: expected it without %s, got both", given,
                 other.name);
  }
  return {};
}

/// The number of tokens for which places may be given: at most the rows of k and of v.
Dim tokens_of(const AppendTensors& t) {
  return {0, std::min<int64_t>({INT32_MAX, t.k.shape[0], t.v.shape[0]})};
}

Status check_slot_mapping(const AppendTensors& t, Device device) {
  const TensorArgument slots{"slot_mapping", t.slot_mapping};
  FLASHPLAN_RETURN_IF_ERROR(check_alone(slots.name, {{"indptr", t.indptr},
                                                     {"kv_lens", t.kv_lens},
                                                     {"batch_indices", t.batch_indices},
                                                     {"positions", t.positions},
                                                     {"block_table", t.block_table},
                                                     {"page_indptr", t.page_indptr},
                                                     {"page_indices", t.page_indices}}));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(slots, DType::kInt64, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(slots, device));
  return check_shape(slots, {tokens_of(t)});
}

/// The number of requests that the page table has. Its rank has been checked.
int32_t num_requests_of_table(const AppendTensors& t) {
  const int64_t rows = t.block_table.empty() ? t.page_indptr.shape[0] - 1 : t.block_table.shape[0];
  return static_cast<int32_t>(std::clamp<int64_t>(rows, 0, INT32_MAX - 1));
}

Status check_positions(const AppendTensors& t, Device device) {
  const TensorArgument batch_indices{"batch_indices", t.batch_indices};
  const TensorArgument positions{"positions", t.positions};
  FLASHPLAN_RETURN_IF_ERROR(
      check_alone(batch_indices.name, {{"indptr", t.indptr}, {"kv_lens", t.kv_lens}}));
  FLASHPLAN_RETURN_IF_ERROR(check_index(batch_indices, tokens_of(t), device));
  FLASHPLAN_RETURN_IF_ERROR(check_index(positions, Dim::exactly(t.batch_indices.shape[0]), device));
  FLASHPLAN_RETURN_IF_ERROR(
      check_page_table({t.block_table, t.page_indptr, t.page_indices}, 0, device));
  return {};
}

/// Checks the tensors that say where tokens go.
Status check_places(const AppendTensors& t, Device device) {
  if (!t.slot_mapping.empty()) return check_slot_mapping(t, device);
  if (!t.batch_indices.empty() || !t.positions.empty()) return check_positions(t, device);
  const TensorArgument kv_lens{"kv_lens", t.kv_lens};
  FLASHPLAN_RETURN_IF_ERROR(check_index(kv_lens, {0, INT32_MAX - 1}, device));
  const auto batch_size = static_cast<int32_t>(t.kv_lens.shape[0]);
  FLASHPLAN_RETURN_IF_ERROR(
      check_index({"indptr", t.indptr}, Dim::exactly(batch_size + 1), device));
  return check_page_table({t.block_table, t.page_indptr, t.page_indices}, batch_size, device);
}

AppendSide make_side(const TensorView& rows, const TensorView& cache, KvLayout layout, float scale,
                     const TensorView& scales) {
  AppendSide side;
  side.dtype = rows.dtype;
  side.cache_dtype = cache.dtype;
  side.scale = scale;
  side.scales = head_scales(scales);
  side.verbatim = rows.dtype == cache.dtype && scale == 1.0F && scales.empty();
  if (!has_elements(rows) || !has_elements(cache)) return side;
  const int page = page_dimension(layout);
  side.rows = static_cast<const char*>(rows.data);
  side.token_stride = stride_bytes(rows, 0);
  side.row_head_stride = stride_bytes(rows, 1);
  side.cache = static_cast<char*>(cache.data);
  side.page_stride = stride_bytes(cache, 0);
  side.row_stride = stride_bytes(cache, page);
  side.head_stride = stride_bytes(cache, 3 - page);
  side.num_heads = static_cast<int32_t>(rows.shape[1]);
  side.head_dim = static_cast<int32_t>(rows.shape[2]);
  return side;
}

TokenPlaces make_places(const AppendTensors& t) {
  TokenPlaces places;
  const int32_t num_pages = num_pages_of(t.k_cache, t.v_cache);
  if (!t.slot_mapping.empty()) {
    places.pages.num_pages = num_pages;
    places.pages.page_size = make_divisor(page_size_of(t));
    places.slots = static_cast<const int64_t*>(t.slot_mapping.data);
    return places;
  }
  places.pages =
      make_page_table({t.block_table, t.page_indptr, t.page_indices}, page_size_of(t), num_pages);
  if (!t.batch_indices.empty()) {
    places.requests = static_cast<const int32_t*>(t.batch_indices.data);
    places.positions = static_cast<const int32_t*>(t.positions.data);
    places.batch_size = num_requests_of_table(t);
    return places;
  }
  places.indptr = static_cast<const int32_t*>(t.indptr.data);
  places.kv_lens = static_cast<const int32_t*>(t.kv_lens.data);
  places.batch_size = static_cast<int32_t>(t.kv_lens.shape[0]);
  return places;
}

/// Checks the values of batch_indices and positions, which are in host memory.
Status check_position_values(const AppendTensors& t) {
  const PageTableTensors tables{t.block_table, t.page_indptr, t.page_indices};
  const auto* requests = static_cast<const int32_t*>(t.batch_indices.data);
  const auto* positions = static_cast<const int32_t*>(t.positions.data);
  const int32_t num_requests = num_requests_of_table(t);
  const auto count = static_cast<int32_t>(t.batch_indices.shape[0]);
  for (int32_t i = 0; i < count; ++i) {
    if (requests[i] < -1 || requests[i] >= num_requests) {
      return error(StatusCode::kInvalidArgument,
                   "batch_indices[%d]: expected -1, or a request in [0, %d), got %d", i,
                   num_requests, requests[i]);
    }
    if (requests[i] < 0) continue;
    if (positions[i] < 0 || positions[i] == INT32_MAX) {
      return error(StatusCode::kInvalidArgument, "positions[%d]: expected one in [0, %d), got %d",
                   i, INT32_MAX, positions[i]);
    }
    FLASHPLAN_RETURN_IF_ERROR(check_page_ids(tables, requests[i], positions[i], positions[i] + 1,
                                             page_size_of(t), num_pages_of(t.k_cache, t.v_cache)));
  }
  return {};
}

}  // namespace

Status check_append(const AppendTensors& t) noexcept {
  const Device device = t.k_cache.device;
  const TensorArgument k{"k", t.k};
  const TensorArgument v{"v", t.v};
  const TensorArgument k_cache{"k_cache", t.k_cache, true};
  const TensorArgument v_cache{"v_cache", t.v_cache, true};
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
  const Dim heads = Dim::exactly(t.k_cache.shape[nhd ? 2 : 1]);
  FLASHPLAN_RETURN_IF_ERROR(check_cache(v_cache, Dim::exactly(page_size_of(t)), heads));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(k, {Dim::any(), heads, Dim::exactly(t.k_cache.shape[3])}));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(v, {Dim::any(), heads, Dim::exactly(t.v_cache.shape[3])}));
  FLASHPLAN_RETURN_IF_ERROR(check_row_size(t));
  FLASHPLAN_RETURN_IF_ERROR(check_scale("k_scale", t.k_scale));
  FLASHPLAN_RETURN_IF_ERROR(check_scale("v_scale", t.v_scale));
  const TensorArgument k_scales{"k_scale", t.k_scales};
  const TensorArgument v_scales{"v_scale", t.v_scales};
  FLASHPLAN_RETURN_IF_ERROR(check_head_scales(k_scales, t.k.shape[1], device));
  FLASHPLAN_RETURN_IF_ERROR(check_head_scales(v_scales, t.v.shape[1], device));
  FLASHPLAN_RETURN_IF_ERROR(check_places(t, device));
  const TensorArgument arguments[] = {k_cache,
                                      v_cache,
                                      k,
                                      v,
                                      {"indptr", t.indptr},
                                      {"kv_lens", t.kv_lens},
                                      {"block_table", t.block_table},
                                      {"page_indptr", t.page_indptr},
                                      {"page_indices", t.page_indices},
                                      {"slot_mapping", t.slot_mapping},
                                      {"batch_indices", t.batch_indices},
                                      {"positions", t.positions},
                                      k_scales,
                                      v_scales};
  return check_apart(arguments);
}

Status check_append_values(const AppendTensors& t, const TensorView& q) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_scales("k_scale", t.k_scale, t.k_scales));
  FLASHPLAN_RETURN_IF_ERROR(check_scales("v_scale", t.v_scale, t.v_scales));
  if (!t.slot_mapping.empty()) {
    return check_slots(t.slot_mapping, page_size_of(t), num_pages_of(t.k_cache, t.v_cache));
  }
  if (!t.batch_indices.empty()) return check_position_values(t);
  const PageTableTensors tables{t.block_table, t.page_indptr, t.page_indices};
  const auto* indptr = static_cast<const int32_t*>(t.indptr.data);
  const auto* kv_lens = static_cast<const int32_t*>(t.kv_lens.data);
  const auto batch_size = static_cast<int32_t>(t.kv_lens.shape[0]);
  const int32_t page_size = page_size_of(t);
  const int32_t num_pages = num_pages_of(t.k_cache, t.v_cache);
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
    const int32_t first_new = kv_lens[r] - (indptr[r + 1] - indptr[r]);
    FLASHPLAN_RETURN_IF_ERROR(
        check_page_ids(tables, r, first_new, kv_lens[r], page_size, num_pages));
  }
  for (const TensorArgument& rows :
       {TensorArgument{"k", t.k}, TensorArgument{"v", t.v}, TensorArgument{"q", q}}) {
    if (rows.view.empty() || rows.view.shape[0] >= indptr[batch_size]) continue;
    return error(StatusCode::kInvalidArgument, "%s: expected >= %d rows (indptr[%d]), got %lld",
                 rows.name, indptr[batch_size], batch_size,
                 static_cast<long long>(rows.view.shape[0]));
  }
  return {};
}

AppendParams make_append_params(const AppendTensors& t, const TensorView& q) noexcept {
  AppendParams p;
  p.sides[0] = make_side(t.k, t.k_cache, t.layout, t.k_scale, t.k_scales);
  p.sides[1] = make_side(t.v, t.v_cache, t.layout, t.v_scale, t.v_scales);
  p.places = make_places(t);
  int64_t rows = std::min<int64_t>({INT32_MAX, t.k.shape[0], t.v.shape[0]});
  if (!q.empty()) rows = std::min(rows, q.shape[0]);
  if (!t.slot_mapping.empty()) {
    rows = t.slot_mapping.shape[0];
  } else if (!t.batch_indices.empty()) {
    rows = t.batch_indices.shape[0];
  } else if (t.k_cache.device.type == DeviceType::kCpu) {
    rows = p.places.indptr[p.places.batch_size];
  }
  p.num_rows = static_cast<int32_t>(rows);
  return p;
}

bool has_work(const AppendParams& p) noexcept {
  const bool has_requests = p.places.slots != nullptr || p.places.batch_size > 0;
  return p.num_rows > 0 && has_requests && p.sides[0].num_heads + p.sides[1].num_heads > 0;
}

Status append_paged_kv(const AppendTensors& t, Stream stream) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_append(t));
  const Device device = t.k_cache.device;
  const bool on_cpu = device.type == DeviceType::kCpu;
  if (on_cpu) FLASHPLAN_RETURN_IF_ERROR(check_append_values(t, {}));
  const AppendParams p = make_append_params(t, {});
  if (!has_work(p)) return {};
  if (!on_cpu) return cuda::append_paged_kv(p, device, stream);
  cpu::append_paged_kv(p);
  return {};
}

}  // namespace flashplan
