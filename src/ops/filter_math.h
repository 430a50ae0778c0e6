// SPDX-License-Identifier: Apache-2.0
// The probabilities of the values that filters keep of a row, with the same bits on the CPU and on
// a GPU.
#pragma once

#include <cstdint>

#include "ops/sampling_math.h"

namespace flashplan::sampling {

/// Keeps the first of a row's largest values, as temperature 0 does.
FLASHPLAN_HOST_DEVICE Cut keep_largest(float largest) { return {key_of(largest), 1U, 0U}; }

/// Whether a cut keeps a value. `is_kept_tie`: whether fewer than num_ties values with the cut's
/// key come before it in the row.
FLASHPLAN_HOST_DEVICE bool keeps(const Cut& cut, float x, bool is_kept_tie, const Scale& scale) {
  const uint32_t key = key_of(x);
  if (key < cut.key || (key == cut.key && !is_kept_tie)) return false;
  return cut.min_weight == 0 || weight_of(x, scale) >= cut.min_weight;
}

/// The sum by which probability_of() divides: that of the kept values, whose weights sum to
/// `total`.
FLASHPLAN_HOST_DEVICE float sum_of_kept(uint64_t total, const Scale& scale) {
  return sum_of_weights(total, scale.from_probs ? scale.largest : 1.0F);
}

/// The probability of a value that is kept. `sum`: sum_of_kept() of the row.
FLASHPLAN_HOST_DEVICE float probability_of(float x, const Scale& scale, float sum) {
  if (scale.from_probs) return ratio(x, sum);
  const float below = distance(x, scale);
  return below < 1.0F ? ratio(power_at<0>(below), sum) : 0.0F;
}

/// The log-probability of a kept value. `log_of_ratio(part, all)`: log(part / all), by a function
/// of the device.
template <class Log>
FLASHPLAN_HOST_DEVICE float log_probability_of(float x, const Scale& scale, float temperature,
                                               uint64_t total, const Log& log_of_ratio) {
  const double all = static_cast<double>(total);
  constexpr double kOneAsDouble = 1073741824.0;
  if (scale.from_probs) {
    return log_of_ratio(static_cast<double>(x) * kOneAsDouble,
                        static_cast<double>(scale.largest) * all);
  }
  const double below = static_cast<double>(x) - static_cast<double>(scale.largest);
  return static_cast<float>(below / static_cast<double>(temperature) -
                            static_cast<double>(log_of_ratio(all, kOneAsDouble)));
}

}  // namespace flashplan::sampling
