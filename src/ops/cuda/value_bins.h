// SPDX-License-Identifier: Apache-2.0
// Counts or masses of a row's elements by narrow ranges of values, in shared memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/sampling_math.h"

namespace flashplan::cuda {

/// The bins of logits: equal ranges, 256 for each power of two of the weight, some above a base and
/// most below it. The first and the last bin also have what lies beyond them.
class ValueBins {
 public:
  static constexpr int kBins = 8192;
  static constexpr float kOfOctave = 256.0F;

  ValueBins() = default;
  /// To count elements. `factor`: that of the row's sampling::Scale.
  static __device__ ValueBins of_counts(float base, float factor) {
    return {base, factor, 8, kFewParts, 1U, 0U};
  }
  /// To sum up weights. A bin is divided into parts. Over so small a range the weight grows
  /// linearly, by a factor of 1 + ln(2) / kOfOctave. So an element in the first part of a bin adds
  /// a number `one`, and an element n parts above it adds n more. `one` is a multiple of the number
  /// of parts.
  static __device__ ValueBins of_weights(float base, float factor, int32_t vocab) {
    // Sums of as many elements as a row has fit 32 bits.
    const int log_parts = vocab <= 181000 ? kManyParts : kFewParts;
    constexpr uint32_t kPartsOfOne = 369;  // kOfOctave / ln(2)
    return {base, factor, 12, log_parts, kPartsOfOne << log_parts, (1U << log_parts) - 1};
  }

  __device__ int bin_of(float x) const { return static_cast<int>(part_of(x) >> log_parts_); }
  __device__ bool is_in_last(float x) const { return bin_of(x) == kBins - 1; }
  /// Adds an element to the bins `sums`.
  __device__ void add(uint32_t* sums, float x) const {
    const uint32_t part = part_of(x);
    atomicAdd(&sums[part >> log_parts_], amount_of_part(part));
  }
  /// What an element adds to its bin.
  __device__ uint32_t amount_of(float x) const { return amount_of_part(part_of(x)); }

  /// A number in the units of bins, whose whole part is the bin if it is not beyond the last one.
  __device__ float place_of(float x) const {
    return (sampling::fused(x, slope_, offset_) - kWhole) / static_cast<float>(1 << log_parts_);
  }
  /// The value that has a place.
  __device__ float value_of(float place) const {
    return __fdiv_rn(place * static_cast<float>(1 << log_parts_) - (offset_ - kWhole), slope_);
  }

  /// The mass of a bin whose sum is `sum`, in units in which a row has less than 2^53.
  /// `place_of_largest`: the place of the row's largest value.
  __device__ float mass(uint32_t sum, int bin, float place_of_largest) const {
    // Elements that are counted are taken for the middle of the bin.
    const float place = static_cast<float>(bin) + (mask_ == 0 ? 0.5F : 0.0F);
    const float octaves = fminf((place - place_of_largest) / kOfOctave, 1.0F);
    return static_cast<float>(sum) * exp2f(octaves + log_scale());
  }
  /// A mass in units of which the row's largest value weighs 2^30, in the units of mass().
  __device__ double mass_of_row(uint64_t total) const {
    return static_cast<double>(total) * 0x1p-30 * one_ * exp2f(log_scale());
  }
  /// How much a sum of weights differs from the exact one, at most, as a part of it.
  __device__ double error() const { return log_parts_ == kManyParts ? 4e-5 : 1.3e-4; }

 private:
  static constexpr int kFewParts = 4;
  static constexpr int kManyParts = 6;
  static constexpr float kWhole = 8388608.0F;  // leaves a whole number in the low bits

  __device__ ValueBins(float base, float factor, int octaves_above, int log_parts, uint32_t one,
                       uint32_t mask)
      : log_parts_(log_parts), one_(one), mask_(mask) {
    const auto parts = static_cast<float>(1 << log_parts);
    slope_ = factor * (32.0F * kOfOctave * parts);
    offset_ =
        kWhole + ((kBins - static_cast<float>(octaves_above) * kOfOctave) * parts - base * slope_);
  }

  __device__ uint32_t amount_of_part(uint32_t part) const { return one_ | (part & mask_); }
  __device__ float log_scale() const { return mask_ == 0 ? 32.0F : 20.0F; }

  /// The number of the part, from the first bin on, that has x.
  __device__ uint32_t part_of(float x) const {
    const float last = kWhole + static_cast<float>((kBins << log_parts_) - 1);
    const float number = fminf(fmaxf(sampling::fused(x, slope_, offset_), kWhole), last);
    return sampling::bits_of(number) & 0x7fffffU;
  }

  float slope_, offset_;
  int log_parts_;
  uint32_t one_, mask_;
};

}  // namespace flashplan::cuda
