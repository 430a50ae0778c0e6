// SPDX-License-Identifier: Apache-2.0
#include "ops/checks.h"

#include <cmath>
#include <span>

#include "checks/tensor_checks.h"
#include "common/dtypes.h"
#include "common/error.h"

namespace flashplan {

Status check_wide(const TensorArgument& argument) noexcept {
  if (is_wide_float(argument.view.dtype)) return {};
  return error(StatusCode::kInvalidType, "%s: expected float32, float16 or bfloat16, got %s",
               argument.name, to_string(argument.view.dtype));
}

Status check_not_negative(const char* name, float value) noexcept {
  if (std::isfinite(value) && value >= 0.0F) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected a finite float32 >= 0, got %g", name,
               static_cast<double>(value));
}

Status check_rows(const TensorArgument& argument) noexcept {
  const TensorView& view = argument.view;
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(argument));
  if (view.rank < 1 || view.rank > kMaxRank) {
    return error(StatusCode::kInvalidArgument, "%s: expected 1 to %d dimensions, got %d",
                 argument.name, kMaxRank, view.rank);
  }
  Dim shape[kMaxRank];
  for (int32_t d = 0; d < view.rank; ++d) shape[d] = Dim::int32();
  FLASHPLAN_RETURN_IF_ERROR(
      check_shape(argument, std::span<const Dim>(shape).first(static_cast<size_t>(view.rank))));
  int64_t count = has_elements(view) ? 1 : 0;
  for (int32_t d = 0; d < view.rank - 1 && count <= INT32_MAX; ++d) count *= view.shape[d];
  if (count <= INT32_MAX) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected < 2^31 rows, got %lld or more",
               argument.name, static_cast<long long>(count));
}

Status check_rows_like(const TensorArgument& argument, const TensorView& like,
                       int64_t last) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_device(argument, like.device));
  Dim shape[kMaxRank];
  for (int32_t d = 0; d < like.rank; ++d) shape[d] = Dim::exactly(like.shape[d]);
  shape[like.rank - 1] = Dim::exactly(last);
  return check_shape(argument, std::span<const Dim>(shape).first(static_cast<size_t>(like.rank)));
}

bool is_same_view(const TensorView& a, const TensorView& b) noexcept {
  bool same = a.data == b.data && a.rank == b.rank;
  for (int32_t d = 0; same && d < a.rank; ++d) {
    same = a.stride[d] == b.stride[d] || a.shape[d] == 1;
  }
  return same;
}

Status check_apart_or_same(const TensorArgument& written, const TensorArgument& other) noexcept {
  return is_same_view(written.view, other.view) ? Status() : check_apart(written, other);
}

}  // namespace flashplan
