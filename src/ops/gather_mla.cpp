// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checks/tensor_checks.h"
#include "common/dtypes.h"
#include "common/error.h"
#include "ops/checks.h"
#include "ops/mla_checks.h"
#include "ops/operators.h"

namespace flashplan {
namespace {

/// The numbers of latent dims (C) and rotated dims (R). Keys of fp8_ds_mla have fixed numbers.
/// Otherwise the second tensor of the cache or of `out` tells where the latent dims end; if there
/// is none, all dims count as latent.
struct KeyDims {
  int64_t parts[2];

  explicit KeyDims(const MlaGatherTensors& t) : parts{0, 0} {
    const TensorView& tail = t.out_tail.empty() ? t.cache.tail : t.out_tail;
    const TensorView& latent = t.out_tail.empty() ? t.cache.latent : t.out;
    if (t.cache.latent.dtype == DType::kFp8DsMla) {
      parts[0] = kDsMlaScaledDims;
      parts[1] = kDsMlaDims - kDsMlaScaledDims;
    } else if (tail.empty()) {
      parts[0] = last(t.cache.latent);
    } else {
      parts[0] = last(latent);
      parts[1] = last(tail);
    }
  }
  static int64_t last(const TensorView& view) {
    return view.rank >= 1 && view.rank <= kMaxRank ? view.shape[view.rank - 1] : 0;
  }
};

Status check_out(const MlaGatherTensors& t, const KeyDims& dims) {
  const DType stored = t.cache.latent.dtype;
  const bool has_tail = !t.out_tail.empty();
  const TensorArgument out{"out", t.out, true};
  const TensorArgument tail{"out_tail", t.out_tail, true};
  if (is_wide_float(stored)) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(out, stored, " (as cache)"));
  } else {
    FLASHPLAN_RETURN_IF_ERROR(check_wide(out));
  }
  const Dim rows = Dim::int32();
  FLASHPLAN_RETURN_IF_ERROR(check_device(out, t.cache.latent.device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(
      out, {rows, Dim::exactly(has_tail ? dims.parts[0] : dims.parts[0] + dims.parts[1])}));
  if (!has_tail) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(tail, t.out.dtype, " (as the other part)"));
  FLASHPLAN_RETURN_IF_ERROR(check_device(tail, t.cache.latent.device));
  return check_shape(tail, {Dim::exactly(t.out.shape[0]), Dim::exactly(dims.parts[1])});
}

Status check_index(const TensorArgument& argument, std::initializer_list<Dim> shape,
                   Device device) {
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, DType::kInt32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(argument, device));
  return check_shape(argument, shape);
}

Status check(const MlaGatherTensors& t, const KeyDims& dims) {
  const TensorArgument cache{"cache", t.cache.latent};
  const Device device = t.cache.latent.device;
  const DType stored = t.cache.latent.dtype;
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(cache));
  if (!is_wide_float(stored) && !is_narrow_float(stored) && stored != DType::kFp8DsMla) {
    return error(StatusCode::kInvalidType, "cache: expected a float dtype or fp8_ds_mla, got %s",
                 to_string(stored));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_mla_cache(t.cache, dims.parts, device, false));
  FLASHPLAN_RETURN_IF_ERROR(check_out(t, dims));
  FLASHPLAN_RETURN_IF_ERROR(check_index({"kv_indptr", t.kv_indptr}, {{1, INT32_MAX}}, device));
  const int64_t batch_size = t.kv_indptr.shape[0] - 1;
  FLASHPLAN_RETURN_IF_ERROR(check_index({"block_table", t.block_table},
                                        {Dim::at_least(batch_size), Dim::int32()}, device));
  if (!t.starts.empty()) {
    FLASHPLAN_RETURN_IF_ERROR(
        check_index({"starts", t.starts}, {Dim::exactly(batch_size)}, device));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_scale("scale", t.scale));
  const TensorArgument arguments[] = {
      {"out", t.out, true},         {"out_tail", t.out_tail, true}, cache,
      {"cache_tail", t.cache.tail}, {"block_table", t.block_table}, {"kv_indptr", t.kv_indptr},
      {"starts", t.starts}};
  return check_apart(arguments);
}

/// Checks the values of index tensors in host memory.
Status check_values(const MlaGatherTensors& t) {
  const auto* indptr = static_cast<const int32_t*>(t.kv_indptr.data);
  const auto* starts = t.starts.empty() ? nullptr : static_cast<const int32_t*>(t.starts.data);
  const auto batch_size = static_cast<int32_t>(t.kv_indptr.shape[0]) - 1;
  const int64_t page_size = page_size_of(t.cache);
  const int32_t num_pages = num_pages_of(t.cache);
  if (indptr[0] < 0) {
    return error(StatusCode::kInvalidArgument, "kv_indptr[0]: expected >= 0, got %d", indptr[0]);
  }
  for (int32_t r = 0; r < batch_size; ++r) {
    const int64_t first = starts == nullptr ? 0 : starts[r];
    const int64_t count = int64_t{indptr[r + 1]} - indptr[r];
    if (count < 0) {
      return error(StatusCode::kInvalidArgument,
                   "kv_indptr[%d]: expected >= kv_indptr[%d] (%d), got %d", r + 1, r, indptr[r],
                   indptr[r + 1]);
    }
    if (first < 0) {
      return error(StatusCode::kInvalidArgument, "starts[%d]: expected >= 0, got %lld", r,
                   static_cast<long long>(first));
    }
    if (count == 0) continue;
    const int64_t needed = (first + count + page_size - 1) / page_size;
    if (needed > t.block_table.shape[1]) {
      return error(StatusCode::kInvalidArgument,
                   "block_table: expected >= %lld columns for token %lld of request %d, got %lld",
                   static_cast<long long>(needed), static_cast<long long>(first + count - 1), r,
                   static_cast<long long>(t.block_table.shape[1]));
    }
    const auto* ids = static_cast<const int32_t*>(t.block_table.data) + r * t.block_table.stride[0];
    for (int64_t column = first / page_size; column < needed; ++column) {
      if (ids[column] >= 0 && ids[column] < num_pages) continue;
      return error(StatusCode::kInvalidArgument,
                   "block_table[%d, %lld]: expected a page in [0, %d), got %d", r,
                   static_cast<long long>(column), num_pages, ids[column]);
    }
  }
  if (t.out.shape[0] >= indptr[batch_size]) return {};
  return error(StatusCode::kInvalidArgument, "out: expected >= %d rows (kv_indptr[%d]), got %lld",
               indptr[batch_size], batch_size, static_cast<long long>(t.out.shape[0]));
}

MlaGatherParams make_params(const MlaGatherTensors& t, const KeyDims& dims) {
  MlaGatherParams p;
  place_parts(t.cache, dims.parts, p.parts);
  int64_t first = 0;  // the part's first dim in a row of `out`
  for (int32_t i = 0; i < 2; ++i) {
    MlaPart& part = p.parts[i];
    const bool is_apart = i == 1 && !t.out_tail.empty();
    const TensorView& out = is_apart ? t.out_tail : t.out;
    part.rows = static_cast<char*>(out.data) + (is_apart ? 0 : first * item_size(out.dtype));
    part.row_stride = stride_bytes(out, 0);
    part.dtype = out.dtype;
    part.verbatim = part.dtype == part.cache_dtype && t.scale == 1.0F;
    first += part.num_dims;
  }
  p.pages = make_page_table({t.block_table, {}, {}}, static_cast<int32_t>(page_size_of(t.cache)),
                            num_pages_of(t.cache));
  p.indptr = static_cast<const int32_t*>(t.kv_indptr.data);
  p.starts = t.starts.empty() ? nullptr : static_cast<const int32_t*>(t.starts.data);
  p.batch_size = static_cast<int32_t>(t.kv_indptr.shape[0]) - 1;
  p.scale = t.scale;
  p.has_scales = t.cache.latent.dtype == DType::kFp8DsMla;
  p.num_rows = static_cast<int32_t>(t.out.shape[0]);
  return p;
}

}  // namespace

Status gather_mla(const MlaGatherTensors& t, Stream stream) noexcept {
  const KeyDims dims(t);
  FLASHPLAN_RETURN_IF_ERROR(check(t, dims));
  const Device device = t.cache.latent.device;
  const bool on_cpu = device.type == DeviceType::kCpu;
  if (on_cpu) FLASHPLAN_RETURN_IF_ERROR(check_values(t));
  const MlaGatherParams p = make_params(t, dims);
  if (p.num_rows == 0 || p.batch_size == 0) return {};
  if (!on_cpu) return cuda::gather_mla(p, device, stream);
  cpu::gather_mla(p);
  return {};
}

}  // namespace flashplan
