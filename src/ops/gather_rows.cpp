// SPDX-License-Identifier: Apache-2.0
#include "checks/tensor_checks.h"
#include "common/error.h"
#include "flashplan/gather.h"
#include "ops/checks.h"
#include "ops/operators.h"

namespace flashplan {
namespace {

Status check(const TensorArgument& x, const TensorArgument& indices, const TensorArgument& out) {
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(x));
  if (x.view.dtype < DType::kFloat32 || x.view.dtype >= DType::kFp8DsMla) {
    return error(StatusCode::kInvalidType, "x: expected numbers, got %s", to_string(x.view.dtype));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_shape(x, {Dim::int32(), Dim::int32()}));
  if (indices.view.dtype != DType::kInt32 && indices.view.dtype != DType::kInt64) {
    return error(StatusCode::kInvalidType, "indices: expected int32 or int64, got %s",
                 to_string(indices.view.dtype));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_device(indices, x.view.device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(indices, {Dim::int32()}));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(out, x.view.dtype, " (as x)"));
  FLASHPLAN_RETURN_IF_ERROR(check_device(out, x.view.device));
  FLASHPLAN_RETURN_IF_ERROR(
      check_shape(out, {Dim::exactly(indices.view.shape[0]), Dim::exactly(x.view.shape[1])}));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out, x));
  return check_apart(out, indices);
}

/// Checks the values of indices in host memory.
Status check_values(const GatherParams& p) {
  for (int32_t i = 0; i < p.num_rows; ++i) {
    if (p.is_inside(p.index(i))) continue;
    return error(StatusCode::kInvalidArgument, "indices[%d]: expected a row in [0, %d), got %lld",
                 i, p.num_x_rows, static_cast<long long>(p.index(i)));
  }
  return {};
}

}  // namespace

Status gather_rows(const TensorView& x, const TensorView& indices, const TensorView& out,
                   Stream stream) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check({"x", x}, {"indices", indices}, {"out", out, true}));
  GatherParams params;
  params.x = static_cast<const char*>(x.data);
  params.x_stride = stride_bytes(x, 0);
  params.out = static_cast<char*>(out.data);
  params.out_stride = stride_bytes(out, 0);
  params.indices = indices.data;
  params.has_wide_indices = indices.dtype == DType::kInt64;
  params.num_x_rows = static_cast<int32_t>(x.shape[0]);
  params.num_rows = static_cast<int32_t>(out.shape[0]);
  params.row_bytes = x.shape[1] * item_size(x.dtype);
  params.item_bytes = static_cast<int32_t>(item_size(x.dtype));
  const bool on_cpu = x.device.type == DeviceType::kCpu;
  if (on_cpu) FLASHPLAN_RETURN_IF_ERROR(check_values(params));
  if (!has_elements(out)) return {};
  if (!on_cpu) return cuda::gather_rows(params, x.device, stream);
  cpu::gather_rows(params);
  return {};
}

}  // namespace flashplan
