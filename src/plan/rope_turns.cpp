// SPDX-License-Identifier: Apache-2.0
#include "plan/rope_turns.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>

#include "common/error.h"

namespace flashplan {
namespace {

// The largest frequency of a pair, in radians per position. With it the number of turns fits into
// an int64 at every position that apply_rope() takes.
constexpr double kMaxFrequency = 1e6;

Status check_number(const char* name, double value, double above) {
  if (std::isfinite(value) && value > above) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected a finite number > %g, got %g", name,
               above, value);
}

/// The frequency of a pair, in radians per position, with the scaling of Llama 3.
double llama3_frequency(const Rope& rope, double frequency) {
  const double rotations = rope.original_length * frequency / (2 * std::numbers::pi);
  if (rotations > rope.high_freq_factor) return frequency;
  if (rotations < rope.low_freq_factor) return frequency / rope.scale;
  const double kept =
      (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - kept) * frequency / rope.scale + kept * frequency;
}

double yarn_frequency(const Rope& rope, int32_t pair, int32_t rotary_dim, double frequency) {
  // The dim whose pair makes `rotations` turns within original_length positions.
  const auto dim_of = [&](double rotations) {
    return rotary_dim * std::log(rope.original_length / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  double low = dim_of(rope.beta_fast);
  double high = dim_of(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, rotary_dim - 1.0);
  const double width = high > low ? high - low : 0.001;
  const double scaled = std::clamp((pair - low) / width, 0.0, 1.0);
  return (1 - scaled) * frequency + scaled * frequency / rope.scale;
}

double frequency_of(const Rope& rope, int32_t pair, int32_t rotary_dim) {
  if (rope.num_frequencies != 0) return rope.frequencies[static_cast<std::size_t>(pair)];
  const double frequency = std::pow(rope.theta, -2.0 * pair / rotary_dim);
  switch (rope.scaling) {
    case RopeScaling::kLinear: break;
    case RopeScaling::kLlama3: return llama3_frequency(rope, frequency);
    case RopeScaling::kYarn: return yarn_frequency(rope, pair, rotary_dim, frequency);
  }
  return frequency / rope.scale;
}

/// Whether attention_factor multiplies cos and sin.
bool has_attention_factor(const Rope& rope) {
  return rope.num_frequencies != 0 || rope.scaling == RopeScaling::kYarn;
}

/// The factor of cos and sin.
double gain_of(const Rope& rope) {
  if (!has_attention_factor(rope)) return 1.0;
  if (rope.attention_factor != 0.0) return rope.attention_factor;
  return rope.num_frequencies == 0 && rope.scale > 1 ? 0.1 * std::log(rope.scale) + 1 : 1.0;
}

Status check_frequencies(const Rope& rope, int64_t rotary_dim) {
  if (rope.num_frequencies != rotary_dim / 2) {
    return error(StatusCode::kInvalidArgument,
                 "rope.frequencies: expected %lld numbers (rotary_dim / 2), got %d",
                 static_cast<long long>(rotary_dim / 2), rope.num_frequencies);
  }
  for (int32_t pair = 0; pair < rope.num_frequencies; ++pair) {
    const double frequency = rope.frequencies[static_cast<std::size_t>(pair)];
    if (frequency >= 0 && frequency <= kMaxFrequency) continue;
    return error(StatusCode::kInvalidArgument,
                 "rope.frequencies[%d]: expected a number in [0, %g], got %g", pair, kMaxFrequency,
                 frequency);
  }
  return {};
}

/// Checks the numbers that frequencies are computed from.
Status check_scaling(const Rope& rope) {
  FLASHPLAN_RETURN_IF_ERROR(check_number("rope.theta", rope.theta, 1.0));
  if (!(std::isfinite(rope.scale) && rope.scale >= 1 / kMaxFrequency)) {
    return error(StatusCode::kInvalidArgument, "rope.scale: expected a finite number >= %g, got %g",
                 1 / kMaxFrequency, rope.scale);
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
  return check_number("rope.beta_fast", rope.beta_fast, rope.beta_slow);
}

}  // namespace

Status check_rope(const Rope& rope, int64_t head_dim) noexcept {
  const int64_t rotary_dim = rope.rotary_dim == 0 ? head_dim : rope.rotary_dim;
  if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > head_dim ||
      rotary_dim > kMaxRotaryDim) {
    return error(StatusCode::kInvalidArgument,
                 "rope.rotary_dim: expected an even number in [2, %lld], got %lld",
                 static_cast<long long>(std::min<int64_t>(head_dim, kMaxRotaryDim)),
                 static_cast<long long>(rotary_dim));
  }
  FLASHPLAN_RETURN_IF_ERROR(rope.num_frequencies != 0 ? check_frequencies(rope, rotary_dim)
                                                      : check_scaling(rope));
  if (!has_attention_factor(rope) || rope.attention_factor == 0.0) return {};
  if (rope.attention_factor > 0 && std::isnormal(static_cast<float>(rope.attention_factor))) {
    return {};
  }
  return error(StatusCode::kInvalidArgument,
               "rope.attention_factor: expected 0 or a normal float32 > 0, got %g",
               rope.attention_factor);
}

RopeTurns make_rope_turns(const Rope& rope, int32_t head_dim) noexcept {
  RopeTurns turns;
  turns.interleaved = rope.interleaved;
  turns.rotary_dim = rope.rotary_dim == 0 ? head_dim : rope.rotary_dim;
  turns.gain = static_cast<float>(gain_of(rope));
  for (int32_t pair = 0; pair < turns.rotary_dim / 2; ++pair) {
    turns.turns[pair] = frequency_of(rope, pair, turns.rotary_dim) / (2 * std::numbers::pi);
  }
  return turns;
}

}  // namespace flashplan
