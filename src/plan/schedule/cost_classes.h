// SPDX-License-Identifier: Apache-2.0
// A counting sort by predicted cost.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <utility>

namespace flashplan {

/// Sorts row tiles or items by cost class, those of the largest costs first. The caller calls add()
/// with the class of each element, then start(), then place() for each element, which returns its
/// place in the order. There are eight classes for each power of two, which is fine enough where
/// the longest work is placed first.
class CostClasses {
 public:
  static constexpr uint16_t kLast = 48 * 8;  // the last class; of() never returns it

  static uint16_t of(int64_t cost) {
    // The position of the leading bit and the three bits after it are a piecewise linear logarithm.
    const uint64_t at_least_8 = static_cast<uint64_t>(cost) + kPerOctave;
    const auto exponent = static_cast<uint32_t>(std::bit_width(at_least_8)) - 4;
    const uint32_t log_scale =
        static_cast<uint32_t>(at_least_8 >> exponent) + exponent * kPerOctave - kPerOctave;
    return static_cast<uint16_t>(kLast - 1 - std::min<uint32_t>(log_scale, kLast - 1));
  }

  void clear() { sizes_.fill(0); }
  void add(uint16_t cost_class) { ++sizes_[cost_class]; }
  void start() {
    int32_t place = 0;
    for (int32_t& size : sizes_) place += std::exchange(size, place);
  }
  int32_t place(uint16_t cost_class) { return sizes_[cost_class]++; }
  /// The first place of a class; valid until place() is called for this class.
  int32_t begin(uint16_t cost_class) const { return sizes_[cost_class]; }

 private:
  static constexpr uint32_t kPerOctave = 8;

  std::array<int32_t, kLast + 1> sizes_ = {};  // sizes of classes; after start(): their next places
};

}  // namespace flashplan
