// SPDX-License-Identifier: Apache-2.0
// In place of the library's element.h: element types and their products, for fibers of the
// emulator.
#pragma once

#include "flashplan/tensor.h"
#include "kernels/device/ptx.h"

namespace flashplan::device {

inline float half_to_float(uint32_t bits) {
  return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(bits)));
}
inline uint32_t float_to_half(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }

/// d += a b^T of m16n8k16 (PTX ISA), where `unpack` makes two floats of a register.
template <typename Unpack>
void emulated_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Unpack unpack) {
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  float rows[2][16];
  float columns[2][16];
  const auto take = [&](float (&to)[16], int first, uint64_t two_registers, bool upper) {
    const float2 pair = unpack(static_cast<uint32_t>(two_registers >> (upper ? 32 : 0)));
    to[first] = pair.x;
    to[first + 1] = pair.y;
  };
  for (int half = 0; half < 2; ++half) {  // of the 16 dims that are multiplied
    const uint64_t* shared = simt::share(a[2 * half] | uint64_t{a[2 * half + 1]} << 32);
    for (int i = 0; i < 4; ++i) {
      take(rows[0], half * 8 + i * 2, shared[g * 4 + i], false);
      take(rows[1], half * 8 + i * 2, shared[g * 4 + i], true);
    }
  }
  const uint64_t* shared = simt::share(b0 | uint64_t{b1} << 32);
  for (int column = 0; column < 2; ++column) {
    for (int i = 0; i < 4; ++i) {
      take(columns[column], i * 2, shared[(2 * t + column) * 4 + i], false);
      take(columns[column], 8 + i * 2, shared[(2 * t + column) * 4 + i], true);
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) d[i] += rows[i / 2][k] * columns[i % 2][k];
  }
}

template <DType>
struct Element;

template <>
struct Element<DType::kFloat16> {
  static constexpr int kBytes = 2;
  static uint32_t pack(float low, float high) {
    return float_to_half(low) | float_to_half(high) << 16;
  }
  static float2 unpack(uint32_t pair) {
    return {half_to_float(pair & 0xffffU), half_to_float(pair >> 16)};
  }
  static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated_mma(d, a, b0, b1, unpack);
  }
};

template <>
struct Element<DType::kBFloat16> {
  static constexpr int kBytes = 2;
  static uint32_t pack(float low, float high) {
    return __float2bfloat16_rn(low).bits | uint32_t{__float2bfloat16_rn(high).bits} << 16;
  }
  static float2 unpack(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U)};
  }
  static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated_mma(d, a, b0, b1, unpack);
  }
};

template <>
struct Element<DType::kFloat8E5M2> {
  static constexpr int kBytes = 1;
  static uint2 widen(uint32_t four) {
    return {__byte_perm(four, 0, 0x1404), __byte_perm(four, 0, 0x3424)};
  }
};

template <>
struct Element<DType::kFloat8E4M3> {
  static constexpr int kBytes = 1;
  static float to_float(uint32_t byte) {
    const auto exponent = static_cast<int>(byte >> 3 & 15);
    const auto mantissa = static_cast<int>(byte & 7);
    float x = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                            : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    if (exponent == 15 && mantissa == 7) x = NAN;
    return (byte & 0x80U) != 0 ? -x : x;
  }
  static uint2 widen(uint32_t four) {
    const auto half = [&](int i) { return float_to_half(to_float(four >> (8 * i) & 0xffU)); };
    return {half(0) | half(1) << 16, half(2) | half(3) << 16};
  }
};

/// Bytes of rows that are widened as a whole; see DType.
template <>
struct Element<DType::kFp8DsMla> {
  static constexpr int kBytes = 1;
};

}  // namespace flashplan::device
