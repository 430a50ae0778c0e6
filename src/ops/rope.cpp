// SPDX-License-Identifier: Apache-2.0
#include "flashplan/rope.h"

#include "checks/tensor_checks.h"
#include "common/error.h"
#include "ops/checks.h"
#include "ops/operators.h"
#include "ops/rope_checks.h"

namespace flashplan {
Status check_positions(const TensorView& positions) noexcept {
  constexpr int64_t kMost = int64_t{1} << 40;
  if (positions.dtype != DType::kInt64) return {};
  const auto* values = static_cast<const int64_t*>(positions.data);
  for (int64_t i = 0; i < positions.shape[0]; ++i) {
    if (values[i] >= -kMost && values[i] <= kMost) continue;
    return error(StatusCode::kInvalidArgument,
                 "positions[%lld]: expected a position in [-2^40, 2^40], got %lld",
                 static_cast<long long>(i), static_cast<long long>(values[i]));
  }
  return {};
}

RopeParams make_rope_params(const Rope& rope, const TensorView& q) noexcept {
  RopeParams p;
  static_cast<RopeTurns&>(p) = make_rope_turns(rope, static_cast<int32_t>(q.shape[2]));
  p.dtype = q.dtype;
  p.num_rows = static_cast<int32_t>(q.shape[0]);
  p.head_dim = static_cast<int32_t>(q.shape[2]);
  return p;
}

RopeSide make_rope_side(const TensorView& from, const TensorView& to) noexcept {
  if (!has_elements(from)) return {};
  return {static_cast<const char*>(from.data), stride_bytes(from, 0), stride_bytes(from, 1),
          static_cast<char*>(to.data),         stride_bytes(to, 0),   stride_bytes(to, 1),
          static_cast<int32_t>(from.shape[1])};
}

Status apply_rope(const TensorView& q, const TensorView& k, const TensorView& positions,
                  const Rope& rope, const TensorView& out_q, const TensorView& out_k,
                  Stream stream) noexcept {
  const TensorArgument q_arg{"q", q};
  const TensorArgument k_arg{"k", k};
  const TensorArgument positions_arg{"positions", positions};
  const TensorArgument out_q_arg{"out_q", out_q, true};
  const TensorArgument out_k_arg{"out_k", out_k, true};
  FLASHPLAN_RETURN_IF_ERROR(check_wide(q_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(q_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(q_arg, {Dim::int32(), Dim::int32(), Dim::int32(2)}));
  const Dim tokens = Dim::exactly(q.shape[0]);
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(k_arg, q.dtype, " (as q)"));
  FLASHPLAN_RETURN_IF_ERROR(check_device(k_arg, q.device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(k_arg, {tokens, Dim::int32(), Dim::exactly(q.shape[2])}));
  if (positions.dtype != DType::kInt64) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(positions_arg, DType::kInt32, " or int64"));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_device(positions_arg, q.device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(positions_arg, {tokens}));
  if (q.shape[1] + k.shape[1] > INT32_MAX / q.shape[2]) {
    return error(StatusCode::kInvalidArgument,
                 "k: expected <= %d elements of q and k in a token, got %lld heads of %lld",
                 INT32_MAX, static_cast<long long>(q.shape[1] + k.shape[1]),
                 static_cast<long long>(q.shape[2]));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_rope(rope, q.shape[2]));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(out_q_arg, q.dtype, " (as q)"));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(out_k_arg, q.dtype, " (as q)"));
  FLASHPLAN_RETURN_IF_ERROR(check_rows_like(out_q_arg, q, q.shape[2]));
  FLASHPLAN_RETURN_IF_ERROR(check_rows_like(out_k_arg, k, k.shape[2]));
  FLASHPLAN_RETURN_IF_ERROR(check_apart_or_same(out_q_arg, q_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart_or_same(out_k_arg, k_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_q_arg, k_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_k_arg, q_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_q_arg, out_k_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_q_arg, positions_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_k_arg, positions_arg));
  if (q.shape[0] == 0) return {};

  RopeParams p = make_rope_params(rope, q);
  p.sides[0] = make_rope_side(q, out_q);
  p.sides[1] = make_rope_side(k, out_k);
  p.positions = positions.data;
  p.has_wide_positions = positions.dtype == DType::kInt64;
  if (q.device.type == DeviceType::kCuda) return cuda::apply_rope(p, q.device, stream);
  FLASHPLAN_RETURN_IF_ERROR(check_positions(positions));
  cpu::apply_rope(p);
  return {};
}

}  // namespace flashplan
