// SPDX-License-Identifier: Apache-2.0
#include "plan/rope_turns.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "common/error.h"

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

void fill_turns(const Rope& rope, RopeTurns* p) {
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

RopeTurns make_rope_turns(const Rope& rope, int32_t head_dim) noexcept {
  RopeTurns turns;
  turns.interleaved = rope.interleaved;
  turns.rotary_dim = rope.rotary_dim == 0 ? head_dim : rope.rotary_dim;
  fill_turns(rope, &turns);
  return turns;
}

}  // namespace flashplan
