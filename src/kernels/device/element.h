// SPDX-License-Identifier: Apache-2.0
// Element types on the device: packing, widening, and the matrix instruction of each.
#pragma once

#include "flashplan/tensor.h"
#include "kernels/device/ptx.h"

namespace flashplan::device {

template <DType>
struct Element;

template <>
struct Element<DType::kFloat16> {
  static constexpr int kBytes = 2;

  /// Packs two elements, `low` at the lower address.
  static FLASHPLAN_DEVICE uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static FLASHPLAN_DEVICE float2 unpack(uint32_t pair) {
    float2 values;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
        : "=f"(values.x), "=f"(values.y)
        : "r"(pair));
    return values;
  }
  /// d += a * b: 16 x 16 times 16 x 8 (PTX ISA, m16n8k16).
  static FLASHPLAN_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                   uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct Element<DType::kBFloat16> {
  static constexpr int kBytes = 2;

  static FLASHPLAN_DEVICE uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static FLASHPLAN_DEVICE float2 unpack(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U)};
  }
  static FLASHPLAN_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                   uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

/// widen() converts four 8-bit floats to two pairs of float16, exactly.
template <>
struct Element<DType::kFloat8E5M2> {
  static constexpr int kBytes = 1;

  /// e5m2 is the upper half of a float16.
  static FLASHPLAN_DEVICE uint2 widen(uint32_t four) {
    return {__byte_perm(four, 0, 0x1404), __byte_perm(four, 0, 0x3424)};
  }
};

template <>
struct Element<DType::kFloat8E4M3> {
  static constexpr int kBytes = 1;

  static FLASHPLAN_DEVICE uint2 widen(uint32_t four) {
#if __CUDA_ARCH__ >= 890
    uint2 pairs;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
        : "=r"(pairs.x), "=r"(pairs.y)
        : "r"(four));
    return pairs;
#else
    return {widen_pair(__byte_perm(four, 0, 0x1404)), widen_pair(__byte_perm(four, 0, 0x3424))};
#endif
  }

 private:
  /// Widens two e4m3 numbers, which are in the upper bytes of the two 16-bit halves of `lanes`, to
  /// float16. Their bits are shifted to where a float16 has its exponent and mantissa. Because the
  /// exponents have different biases, this gives 2^-8 times the number, so the result is multiplied
  /// by 2^8. The bits 0x7f stand for NaN, which the shift does not give, so it is set separately.
  static FLASHPLAN_DEVICE uint32_t widen_pair(uint32_t lanes) {
    const uint32_t shifted = (lanes & 0x80008000U) | ((lanes & 0x7f007f00U) >> 1);
    uint32_t pair;
    asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(pair) : "r"(shifted), "r"(0x5c005c00U));
    if ((lanes & 0x7f00U) == 0x7f00U) pair |= 0x7fffU;
    if ((lanes & 0x7f000000U) == 0x7f000000U) pair |= 0x7fff0000U;
    return pair;
  }
};

/// DeepSeek's keys, whose rows have 8-bit and 16-bit elements and scales. A row is widened as a
/// whole, so there is no widen().
template <>
struct Element<DType::kFp8DsMla> {
  static constexpr int kBytes = 1;
};

}  // namespace flashplan::device
