// SPDX-License-Identifier: Apache-2.0
// Sums of the weights of a row's elements by narrow ranges of values, in shared memory. They also
// tell how many elements a bin has, as the weights of a bin are nearly equal.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/sampling_math.h"

namespace flashplan::cuda {

/// A bin is divided into parts. Within one bin the weight grows about linearly, so an element n
/// parts above the first part of its bin adds n more to the bin's sum than an element in the first
/// part. The first bin also has all values below it, and the last bin all values above it.
///
/// Logits: equal ranges, 353 for each power of two of the weight, five powers of two above a base
/// and 18 below it. Probabilities: 256 bins for each power of two from 2^-31 on.
template <bool kFromProbs>
class ValueBins {
 public:
  static constexpr int kBins = 8192;
  /// A row may have at most this many elements, so that the sum of a bin fits 32 bits.
  static constexpr int32_t kMostElements = kFromProbs ? 262144 : 262600;
  /// The largest relative error of a sum of weights: half a part of a bin for each element, and the
  /// rounding of sums of bins.
  static constexpr double kError = kFromProbs ? 8e-5 : 5e-5;

  ValueBins() = default;
  /// `factor`: that of the row's sampling::Scale. Probabilities need neither it nor the base.
  __device__ ValueBins(float base, float factor)
      : slope_(factor * (32.0F * kOfOctave / kBinsOfRange)),
        offset_((kBins - 5 * kOfOctave) / kBinsOfRange - base * slope_) {}

  /// The index of the part that x is in, over all bins.
  __device__ uint32_t part_of(float x) const {
    if (kFromProbs) {
      const auto part = static_cast<int>((sampling::bits_of(x) + (1U << (kShift - 1))) >> kShift);
      const int from_first = part - (kFirst << kLogParts);
      return static_cast<uint32_t>(min(max(from_first, 0), (kBins << kLogParts) - 1));
    }
    const float place = within_one(sampling::fused(x, slope_, offset_));
    return sampling::bits_of(sampling::fused(place, kLastPart, kWhole)) & 0x7fffffU;
  }
  static __device__ int bin_of_part(uint32_t part) { return static_cast<int>(part >> kLogParts); }
  __device__ int bin_of(float x) const { return bin_of_part(part_of(x)); }
  __device__ bool is_in_last(float x) const { return bin_of(x) == kBins - 1; }
  /// All elements of the last bin are at least this value, even where floats are further apart than
  /// bins. No probability is in the last bin.
  __device__ float least_of_last() const {
    if (kFromProbs) return INFINITY;
    const float value = value_of(static_cast<float>(kBins) - 1.5F);
    return value - fabsf(value) * 0x1p-18F;
  }

  /// What an element adds to its bin.
  static __device__ uint32_t amount_of_part(uint32_t part) { return kOne | (part & kMask); }
  __device__ uint32_t amount_of(float x) const { return amount_of_part(part_of(x)); }
  /// Adds an element to `sums`, which has a word for each bin and kRest more. Elements of the first
  /// bin, which may be most of a row, are added to the word `rest`, of which each lane has its own:
  /// the atomics on one word would wait for each other, and a branch around them would divide the
  /// warp.
  static constexpr int kRest = 32;
  static __device__ void add(uint32_t* sums, uint32_t part, int rest) {
    const int bin = bin_of_part(part);
    atomicAdd(&sums[bin != 0 ? bin : rest], amount_of_part(part));
  }
  /// How many elements a bin has whose sum is `sum`: exact up to 500 elements.
  static __device__ uint32_t count_in(uint32_t sum, int bin) {
    const uint32_t first = static_cast<uint32_t>(bin) << kLogParts;
    const auto middle = static_cast<float>(amount_of_part(first)) + 0.5F * kLast;
    return static_cast<uint32_t>(static_cast<float>(sum) / middle + 0.5F);
  }

  /// Where x lies, in units of bins: rounded down, it is the number of the bin, unless x is outside
  /// of all bins. It is 0 for probabilities, whose bins do not depend on a base.
  __device__ float place_of(float x) const {
    return kFromProbs ? 0.0F : sampling::fused(x, slope_, offset_) * kBinsOfRange;
  }
  /// Whether the place of the row's largest value, or of the base, can be used: not if it has
  /// overflowed, by extreme temperatures or logits, or by a base of -infinity.
  static __device__ bool is_place(float place) { return place >= 0.0F && place < INFINITY; }
  /// The value at which a bin begins, or at a place between bins.
  __device__ float value_of(float bin) const {
    if (!kFromProbs) return __fdiv_rn(bin / kBinsOfRange - offset_, slope_);
    constexpr int kBitsOfBin = kShift + kLogParts;
    return sampling::float_of((static_cast<uint32_t>(kFirst) << kBitsOfBin) +
                              static_cast<uint32_t>(fmaxf(bin, 0.0F) * (1 << kBitsOfBin)));
  }

  /// The mass of a bin whose sum is `sum`. Logits: relative to the weight of the value at the place
  /// `largest`; if that is the row's largest value, the masses of all bins sum to less than 2^53.
  /// Probabilities: 1 is 2^33.
  static __device__ float mass(uint32_t sum, int bin, float largest) {
    if (kFromProbs) {
      const uint32_t exponent = static_cast<uint32_t>(bin + kFirst) >> 8;
      return static_cast<float>(sum) * sampling::float_of((exponent + 33 - 13) << 23);
    }
    return static_cast<float>(sum) *
           exp2f((static_cast<float>(bin) - largest) / kOfOctave + kLogScale);
  }
  /// What mass() returns for the place `largest`, times this factor, is what it returns for the
  /// place `other_largest`.
  static __device__ float unit_in(float largest, float other_largest) {
    return exp2f((largest - other_largest) / kOfOctave);
  }
  /// Converts a mass to the units of mass(), from units in which the row's largest logit, or a
  /// probability of 1, weighs 2^30.
  static __device__ double mass_of_row(uint64_t total) {
    return static_cast<double>(total) * (kFromProbs ? 8.0 : 0x1p-30 * kOne * 0x1p20);
  }

 private:
  static constexpr int kLogParts = 5;
  static constexpr int kShift = 10;  // probabilities: bits of a float below those of its part
  // Probabilities: the upper 17 bits of the float 2^-31, at which the first bin begins.
  static constexpr int kFirst = 24576;
  static constexpr uint32_t kGrowth = 510;  // logits: weights grow by 1 / kGrowth from bin to bin
  static constexpr uint32_t kOne = kFromProbs ? 8192 : kGrowth << kLogParts;
  // Bits that amount_of_part() adds. Probabilities: of the mantissa. Logits: the part in its bin.
  static constexpr uint32_t kMask = kFromProbs ? 8191 : (1U << kLogParts) - 1;
  static constexpr auto kLast = static_cast<float>((1 << kLogParts) - 1);
  static constexpr float kOfOctave = kGrowth * 0.693147181F;
  static constexpr float kLogScale = 20.0F;
  // A logit is placed between the first part, at 0, and the last one, at 1.
  static constexpr auto kLastPart = static_cast<float>((kBins << kLogParts) - 1);
  static constexpr float kBinsOfRange = kLastPart / (1 << kLogParts);
  static constexpr float kWhole = 8388608.0F;  // 2^23: floats from it on are whole numbers

  /// x, but at least 0 and at most 1. On a GPU it is part of the instruction that computes x.
  static __device__ float within_one(float x) {
#ifdef __CUDA_ARCH__
    return __saturatef(x);
#else
    return fminf(fmaxf(x, 0.0F), 1.0F);
#endif
  }

  float slope_, offset_;
};

}  // namespace flashplan::cuda
