// SPDX-License-Identifier: Apache-2.0
#include "flashplan/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "api/tensor_checks.h"
#include "common/error.h"
#include "ops/checks.h"
#include "ops/operators.h"
#include "ops/rope_checks.h"

namespace flashplan {
namespace {

Status check_number(const char* name, double value, double above) {
  if (std::isfinite(value) && value > above) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected a finite number > %g, got %g", name,
               above, value);
}

/// Radians from one position to the next.
double llama3_frequency(const Rope& rope, double frequency) {
  const double rotations = rope.original_length * frequency / (2 * std::numbers::pi);
  if (rotations > rope.high_freq_factor) return frequency;
  if (rotations < rope.low_freq_factor) return frequency / rope.scale;
  const double kept =
      (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - kept) * frequency / rope.scale + kept * frequency;
}

double yarn_frequency(const Rope& rope, int32_t pair, int32_t rotary_dim, double frequency) {
  // The dim that makes `rotations` in original_length.
  const auto dim_of = [&](double rotations) {
    return rotary_dim * std::log(rope.original_length / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  const double low = std::max(std::floor(dim_of(rope.beta_fast)), 0.0);
  const double high = std::min(std::ceil(dim_of(rope.beta_slow)), rotary_dim - 1.0);
  const double width = high > low ? high - low : 0.001;
  const double scaled = std::clamp((pair - low) / width, 0.0, 1.0);
  return (1 - scaled) * frequency + scaled * frequency / rope.scale;
}

void fill_turns(const Rope& rope, RopeParams* p) {
  for (int32_t pair = 0; pair < p->rotary_dim / 2; ++pair) {
    double frequency = std::pow(rope.theta, -2.0 * pair / p->rotary_dim);
    switch (rope.scaling) {
      case RopeScaling::kLinear: frequency /= rope.scale; break;
      case RopeScaling::kLlama3: frequency = llama3_frequency(rope, frequency); break;
      case RopeScaling::kYarn:
        frequency = yarn_frequency(rope, pair, p->rotary_dim, frequency);
        break;
    }
    p->turns[pair] = frequency / (2 * std::numbers::pi);
  }
  if (rope.scaling != RopeScaling::kYarn) return;
  const double by_scale = rope.scale > 1 ? 0.1 * std::log(rope.scale) + 1 : 1.0;
  p->gain = static_cast<float>(rope.attention_factor != 0.0 ? rope.attention_factor : by_scale);
}

}  // namespace

Status check_rope(const Rope& rope, int64_t head_dim) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_number("rope.theta", rope.theta, 1.0));
  FLASHPLAN_RETURN_IF_ERROR(check_number("rope.scale", rope.scale, 0.0));
  const int64_t rotary_dim = rope.rotary_dim == 0 ? head_dim : rope.rotary_dim;
  if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > head_dim ||
      rotary_dim > kMaxRotaryDim) {
    return error(StatusCode::kInvalidArgument,
                 "rope.rotary_dim: expected an even number in [2, %lld], got %lld",
                 static_cast<long long>(std::min<int64_t>(head_dim, kMaxRotaryDim)),
                 static_cast<long long>(rotary_dim));
  }
  if (rope.scaling < RopeScaling::kLinear || rope.scaling > RopeScaling::kYarn) {
    return error(StatusCode::kInvalidArgument, "rope.scaling: expected 0 to 2, got %d",
                 static_cast<int>(rope.scaling));
  }
  if (rope.scaling == RopeScaling::kLinear) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_number("rope.original_length", rope.original_length, 0.0));
  if (rope.scaling == RopeScaling::kLlama3) {
    FLASHPLAN_RETURN_IF_ERROR(check_number("rope.low_freq_factor", rope.low_freq_factor, 0.0));
    return check_number("rope.high_freq_factor", rope.high_freq_factor, rope.low_freq_factor);
  }
  FLASHPLAN_RETURN_IF_ERROR(check_number("rope.beta_slow", rope.beta_slow, 0.0));
  FLASHPLAN_RETURN_IF_ERROR(check_number("rope.beta_fast", rope.beta_fast, rope.beta_slow));
  if (rope.attention_factor == 0.0) return {};
  return check_number("rope.attention_factor", rope.attention_factor, 0.0);
}

RopeParams make_rope_params(const Rope& rope, const TensorView& q) noexcept {
  RopeParams p;
  p.interleaved = rope.interleaved;
  p.dtype = q.dtype;
  p.num_rows = static_cast<int32_t>(q.shape[0]);
  p.head_dim = static_cast<int32_t>(q.shape[2]);
  p.rotary_dim = rope.rotary_dim == 0 ? p.head_dim : rope.rotary_dim;
  fill_turns(rope, &p);
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
  cpu::apply_rope(p);
  return {};
}

}  // namespace flashplan
