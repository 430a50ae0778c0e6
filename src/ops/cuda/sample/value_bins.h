// SPDX-License-Identifier: Apache-2.0
// Counts or masses of a row's elements by narrow ranges of values, in shared memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/sampling_math.h"

namespace flashplan::cuda {

/// The bins of logits: equal ranges, 256 or more for each power of two of the weight, some above a
/// base and most below it. The first and the last bin also have what lies beyond them.
class ValueBins {
 public:
  static constexpr int kBins = 8192;

  ValueBins() = default;
  /// To count elements. `factor`: that of the row's sampling::Scale.
  static __device__ ValueBins of_counts(float base, float factor) {
    return {base, factor, 256.0F, 8, 1U, 0U};
  }
  /// To sum up weights. A bin is divided into parts. Over so small a range the weight grows
  /// linearly: from one bin to the next by 1 / kGrowth. So an element in the first part of a bin
  /// adds a number `one`, and an element n parts above it adds n more.
  static __device__ ValueBins of_weights(float base, float factor) {
    return {base, factor, kGrowth * 0.693147181F, 5, kGrowth << kLogParts, (1U << kLogParts) - 1};
  }
  /// Sums of weights of as many elements fit 32 bits.
  static constexpr int32_t kMostElements = 262600;
  /// How much a sum of weights differs from the exact one, at most, as a part of it: half a part
  /// for each element, and the rounding of sums of bins.
  static constexpr double kError = 5e-5;

  __device__ int bin_of(float x) const { return static_cast<int>(part_of(x) >> kLogParts); }
  __device__ bool is_in_last(float x) const { return bin_of(x) == kBins - 1; }
  /// Adds an element to the bins `sums`.
  __device__ void add(uint32_t* sums, float x) const {
    const uint32_t part = part_of(x);
    atomicAdd(&sums[part >> kLogParts], amount_of_part(part));
  }
  /// The same but for elements of the first bin, which is where most of a row's elements may be:
  /// the atomics on it would wait for each other.
  __device__ void add_above_first(uint32_t* sums, float x) const {
    const uint32_t part = part_of(x);
    if (part >> kLogParts != 0) atomicAdd(&sums[part >> kLogParts], amount_of_part(part));
  }
  /// What an element adds to its bin.
  __device__ uint32_t amount_of(float x) const { return amount_of_part(part_of(x)); }

  /// A number in the units of bins, whose whole part is the bin if it is not beyond the last one.
  __device__ float place_of(float x) const {
    return sampling::fused(x, slope_, offset_) * kBinsOfRange;
  }
  /// Whether a place of the row's largest value or of the base is usable. It is not if it has
  /// overflowed, as with extreme temperatures or logits, or with a base of -infinity.
  static __device__ bool is_place(float place) { return place >= 0.0F && place < INFINITY; }
  /// The value that has a place.
  __device__ float value_of(float place) const {
    return __fdiv_rn(place / kBinsOfRange - offset_, slope_);
  }

  /// The mass of a bin whose sum is `sum`, relative to the weight of the value at the place
  /// `largest`. If that is the row's largest value, the masses of all bins sum to less than 2^53.
  __device__ float mass(uint32_t sum, int bin, float largest) const {
    // Elements that are counted are taken for the middle of the bin.
    const float place = static_cast<float>(bin) + (mask_ == 0 ? 0.5F : 0.0F);
    return static_cast<float>(sum) * exp2f((place - largest) / of_octave_ + log_scale());
  }
  /// The factor from masses relative to the place `largest` to masses relative to another place.
  __device__ float unit_in(float largest, float other_largest) const {
    return exp2f((largest - other_largest) / of_octave_);
  }
  /// A mass in units of which the row's largest value weighs 2^30, in the units of mass().
  __device__ double mass_of_row(uint64_t total) const {
    return static_cast<double>(total) * 0x1p-30 * one_ * exp2f(log_scale());
  }

 private:
  static constexpr uint32_t kGrowth = 510;
  static constexpr int kLogParts = 5;
  // A value is placed between the first part, at 0, and the last one, at 1.
  static constexpr auto kLastPart = static_cast<float>((kBins << kLogParts) - 1);
  static constexpr float kBinsOfRange = kLastPart / (1 << kLogParts);
  static constexpr float kWhole = 8388608.0F;  // leaves a whole number in the low bits

  __device__ ValueBins(float base, float factor, float of_octave, int octaves_above, uint32_t one,
                       uint32_t mask)
      : slope_(factor * (32.0F * of_octave / kBinsOfRange)),
        offset_((kBins - static_cast<float>(octaves_above) * of_octave) / kBinsOfRange -
                base * slope_),
        of_octave_(of_octave),
        one_(one),
        mask_(mask) {}

  __device__ uint32_t amount_of_part(uint32_t part) const { return one_ | (part & mask_); }
  __device__ float log_scale() const { return mask_ == 0 ? 32.0F : 20.0F; }

  /// The number of the part, from the first bin on, that has x.
  __device__ uint32_t part_of(float x) const {
    const float place = within_one(sampling::fused(x, slope_, offset_));
    return sampling::bits_of(sampling::fused(place, kLastPart, kWhole)) & 0x7fffffU;
  }
  /// x, but at least 0 and at most 1. On a GPU it is part of the instruction that computes x.
  static __device__ float within_one(float x) {
#ifdef __CUDA_ARCH__
    return __saturatef(x);
#else
    return fminf(fmaxf(x, 0.0F), 1.0F);
#endif
  }

  float slope_, offset_;
  float of_octave_;  // bins
  uint32_t one_, mask_;
};

}  // namespace flashplan::cuda
