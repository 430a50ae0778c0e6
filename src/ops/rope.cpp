// SPDX-License-Identifier: Apache-2.0
#include "flashplan/rope.h"

#include <algorithm>

#include "checks/tensor_checks.h"
#include "common/dtypes.h"
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

namespace {

/// Checks that the positions, in host memory, are rows of the table.
Status check_rows_of_table(const RopeParams& p) {
  for (int32_t token = 0; token < p.num_rows; ++token) {
    if (p.table_row(token) != nullptr) continue;
    return error(StatusCode::kInvalidArgument,
                 "positions[%d]: expected a row of cos_sin_cache, in [0, %lld), got %.0f", token,
                 static_cast<long long>(p.table_rows), p.position(token));
  }
  return {};
}

Status check_inputs(const TensorView& q, const TensorView& k, const TensorView& positions) {
  const TensorArgument q_arg{"q", q};
  const TensorArgument k_arg{"k", k};
  const TensorArgument positions_arg{"positions", positions};
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
  return {};
}

/// Checks the scales of 8-bit results, but for the values of tensors.
Status check_scales_of(const TensorView& q, const TensorView& k, bool is_narrow,
                       const RopeScales& s) {
  const struct {
    const char* name;
    float number;
    const TensorView& tensor;
  } scales[] = {{"q_scale", s.q_scale, s.q_scales}, {"k_scale", s.k_scale, s.k_scales}};
  for (const auto& [name, number, tensor] : scales) {
    if (!is_narrow && (number != 1.0F || !tensor.empty())) {
      return error(StatusCode::kInvalidArgument, "%s: expected 1 with results of %s, got %s", name,
                   to_string(q.dtype), tensor.empty() ? "another number" : "a tensor");
    }
    FLASHPLAN_RETURN_IF_ERROR(check_scale(name, number));
    FLASHPLAN_RETURN_IF_ERROR(check_head_scales({name, tensor}, k.shape[1], q.device));
    if (!tensor.empty() && tensor.shape[0] == 0) {
      return error(StatusCode::kInvalidArgument, "%s: expected at least one scale, got none", name);
    }
  }
  const bool has_q_scales = !s.q_scales.empty() && s.q_scales.shape[0] > 1;
  if (!has_q_scales || q.shape[1] % k.shape[1] == 0) return {};
  return error(StatusCode::kInvalidArgument,
               "q_scale: expected one scale, since %lld heads of k do not divide %lld of q, got "
               "one for each head of k",
               static_cast<long long>(k.shape[1]), static_cast<long long>(q.shape[1]));
}

Status check_results(const TensorView& q, const TensorView& k, const TensorView& positions,
                     const TensorView& out_q, const TensorView& out_k, const RopeScales& scales) {
  const TensorArgument q_arg{"q", q};
  const TensorArgument k_arg{"k", k};
  const TensorArgument positions_arg{"positions", positions};
  const TensorArgument out_q_arg{"out_q", out_q, true};
  const TensorArgument out_k_arg{"out_k", out_k, true};
  const bool is_narrow = is_narrow_float(out_q.dtype);
  if (out_q.dtype != q.dtype && !is_narrow) {
    return error(StatusCode::kInvalidType,
                 "out_q: expected %s (as q), float8_e4m3fn or float8_e5m2, got %s",
                 to_string(q.dtype), to_string(out_q.dtype));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(out_k_arg, out_q.dtype, " (as out_q)"));
  FLASHPLAN_RETURN_IF_ERROR(check_rows_like(out_q_arg, q, q.shape[2]));
  FLASHPLAN_RETURN_IF_ERROR(check_rows_like(out_k_arg, k, k.shape[2]));
  FLASHPLAN_RETURN_IF_ERROR(check_scales_of(q, k, is_narrow, scales));
  for (const TensorArgument& out : {out_q_arg, out_k_arg}) {
    FLASHPLAN_RETURN_IF_ERROR(check_apart(out, {"q_scale", scales.q_scales}));
    FLASHPLAN_RETURN_IF_ERROR(check_apart(out, {"k_scale", scales.k_scales}));
  }
  // 8-bit results are smaller than the elements that they are computed from, so they can not be
  // written in place.
  FLASHPLAN_RETURN_IF_ERROR(is_narrow ? check_apart(out_q_arg, q_arg)
                                      : check_apart_or_same(out_q_arg, q_arg));
  FLASHPLAN_RETURN_IF_ERROR(is_narrow ? check_apart(out_k_arg, k_arg)
                                      : check_apart_or_same(out_k_arg, k_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_q_arg, k_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_k_arg, q_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_q_arg, out_k_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_q_arg, positions_arg));
  return check_apart(out_k_arg, positions_arg);
}

/// Checks the values of scales in host memory.
Status check_scale_values(const RopeScales& s) {
  FLASHPLAN_RETURN_IF_ERROR(check_scales("q_scale", s.q_scale, s.q_scales));
  return check_scales("k_scale", s.k_scale, s.k_scales);
}

void set_heads(const TensorView& q, RopeParams* p) {
  p->dtype = p->out_dtype = q.dtype;
  p->num_rows = static_cast<int32_t>(q.shape[0]);
  p->head_dim = static_cast<int32_t>(q.shape[2]);
}

void set_tensors(const TensorView& q, const TensorView& k, const TensorView& positions,
                 const TensorView& out_q, const TensorView& out_k, const RopeScales& scales,
                 RopeParams* p) {
  p->sides[0] = make_rope_side(q, out_q);
  p->sides[0].scale = scales.q_scale;
  p->sides[0].scales = head_scales(scales.q_scales);
  p->sides[1] = make_rope_side(k, out_k);
  p->sides[1].scale = scales.k_scale;
  p->sides[1].scales = head_scales(scales.k_scales);
  const int32_t num_kv_heads = p->sides[1].num_heads;
  // If q has fewer heads than k, it has only one scale, which scale_of() finds with any group size.
  if (num_kv_heads > 0) {
    p->sides[0].group_size = std::max(p->sides[0].num_heads / num_kv_heads, 1);
  }
  p->out_dtype = out_q.dtype;
  p->positions = positions.data;
  p->has_wide_positions = positions.dtype == DType::kInt64;
}

}  // namespace

RopeParams make_rope_params(const Rope& rope, const TensorView& q) noexcept {
  RopeParams p;
  static_cast<RopeTurns&>(p) = make_rope_turns(rope, static_cast<int32_t>(q.shape[2]));
  set_heads(q, &p);
  return p;
}

RopeSide make_rope_side(const TensorView& from, const TensorView& to) noexcept {
  RopeSide side;
  if (!has_elements(from)) return side;
  side.from = static_cast<const char*>(from.data);
  side.from_token_stride = stride_bytes(from, 0);
  side.from_head_stride = stride_bytes(from, 1);
  side.to = static_cast<char*>(to.data);
  side.to_token_stride = stride_bytes(to, 0);
  side.to_head_stride = stride_bytes(to, 1);
  side.num_heads = static_cast<int32_t>(from.shape[1]);
  return side;
}

Status apply_rope(const TensorView& q, const TensorView& k, const TensorView& positions,
                  const Rope& rope, const TensorView& out_q, const TensorView& out_k, Stream stream,
                  const RopeScales& scales) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_inputs(q, k, positions));
  FLASHPLAN_RETURN_IF_ERROR(check_rope(rope, q.shape[2]));
  FLASHPLAN_RETURN_IF_ERROR(check_results(q, k, positions, out_q, out_k, scales));
  if (q.shape[0] == 0) return {};
  RopeParams p = make_rope_params(rope, q);
  set_tensors(q, k, positions, out_q, out_k, scales, &p);
  if (q.device.type == DeviceType::kCuda) return cuda::apply_rope(p, q.device, stream);
  FLASHPLAN_RETURN_IF_ERROR(check_positions(positions));
  FLASHPLAN_RETURN_IF_ERROR(check_scale_values(scales));
  cpu::apply_rope(p);
  return {};
}

Status apply_rope(const TensorView& q, const TensorView& k, const TensorView& positions,
                  const TensorView& cos_sin_cache, bool interleaved, const TensorView& out_q,
                  const TensorView& out_k, Stream stream, const RopeScales& scales) noexcept {
  const TensorArgument table{"cos_sin_cache", cos_sin_cache};
  FLASHPLAN_RETURN_IF_ERROR(check_inputs(q, k, positions));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(table, DType::kFloat32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(table, q.device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(table, {Dim::any(), Dim::any()}));
  const int64_t rotary_dim = cos_sin_cache.shape[1];
  const int64_t most = std::min<int64_t>(q.shape[2], kMaxRotaryDim);
  if (rotary_dim < 2 || rotary_dim > most || rotary_dim % 2 != 0) {
    return error(StatusCode::kInvalidArgument,
                 "cos_sin_cache: expected an even number of columns in [2, %lld], got %lld",
                 static_cast<long long>(most), static_cast<long long>(rotary_dim));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_results(q, k, positions, out_q, out_k, scales));
  FLASHPLAN_RETURN_IF_ERROR(check_apart({"out_q", out_q, true}, table));
  FLASHPLAN_RETURN_IF_ERROR(check_apart({"out_k", out_k, true}, table));
  if (q.shape[0] == 0) return {};
  RopeParams p;
  p.interleaved = interleaved;
  p.rotary_dim = static_cast<int32_t>(rotary_dim);
  p.table = static_cast<const float*>(cos_sin_cache.data);
  p.table_stride = cos_sin_cache.stride[0];
  p.table_rows = cos_sin_cache.shape[0];
  set_heads(q, &p);
  set_tensors(q, k, positions, out_q, out_k, scales, &p);
  if (q.device.type == DeviceType::kCuda) return cuda::apply_rope(p, q.device, stream);
  FLASHPLAN_RETURN_IF_ERROR(check_rows_of_table(p));
  FLASHPLAN_RETURN_IF_ERROR(check_scale_values(scales));
  cpu::apply_rope(p);
  return {};
}

}  // namespace flashplan
