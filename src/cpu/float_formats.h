// SPDX-License-Identifier: Apache-2.0
// Conversions between float32 and the narrow formats. They have no branches, so that loops over
// them vectorise. They are always inlined, because this header is compiled for several instruction
// sets.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flashplan/tensor.h"

#define FLASHPLAN_INLINE [[gnu::always_inline]] inline

namespace flashplan::cpu {

FLASHPLAN_INLINE uint32_t float_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
FLASHPLAN_INLINE float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

constexpr uint32_t kFloatInfinity = 0x7f800000U;

/// Storage and conversions of a dtype: load() widens exactly; store() rounds to nearest even.
template <DType dtype>
struct Format;

template <>
struct Format<DType::kFloat32> {
  using Storage = float;
  FLASHPLAN_INLINE static float load(Storage x) { return x; }
  FLASHPLAN_INLINE static Storage store(float x) { return x; }
};

template <>
struct Format<DType::kBFloat16> {
  using Storage = uint16_t;
  FLASHPLAN_INLINE static float load(Storage x) { return bits_float(uint32_t{x} << 16); }
  FLASHPLAN_INLINE static Storage store(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
    const bool is_nan = (bits & 0x7fffffffU) > kFloatInfinity;
    return static_cast<Storage>((is_nan ? bits | 0x400000U : rounded) >> 16);
  }
};

/// IEEE-like formats with `kExponentBits` and `kMantissaBits`. kFinite: there is no infinity, and
/// NaN has all bits 1 except the sign (e4m3fn). kSaturate: store() turns numbers that are too large
/// into the largest finite one; without it, into infinity.
template <int kExponentBits, int kMantissaBits, bool kFinite, bool kSaturate, typename StorageType>
struct SmallFloat {
  using Storage = StorageType;
  using SignedStorage = std::make_signed_t<Storage>;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kMagnitude = (1U << (kExponentBits + kMantissaBits)) - 1;
  static constexpr uint32_t kInfinity = ((1U << kExponentBits) - 1) << kMantissaBits;
  static constexpr uint32_t kMaxFinite = kFinite ? kMagnitude - 1 : kInfinity - 1;
  static constexpr uint32_t kNan = kFinite ? kMagnitude : kInfinity | (1U << (kMantissaBits - 1));

  FLASHPLAN_INLINE static float load(Storage x) {
    // Extending the sign and shifting puts the sign in its place; its other copies are masked away.
    constexpr uint32_t kMask = 0x80000000U | (kMagnitude << kShift);
    const auto extended = static_cast<uint32_t>(int32_t{static_cast<SignedStorage>(x)});
    const uint32_t bits = (extended << kShift) & kMask;
    // The multiplication rebiases the exponent and makes subnormals normal.
    const float value = bits_float(bits) * bits_float(static_cast<uint32_t>(254 - kBias) << 23);
    const uint32_t magnitude = bits & 0x7fffffffU;
    const bool is_special =
        kFinite ? magnitude == kNan << kShift : magnitude >= kInfinity << kShift;
    return is_special ? bits_float(bits | kFloatInfinity) : value;
  }

  FLASHPLAN_INLINE static Storage store(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t sign = (bits >> 31) << (kExponentBits + kMantissaBits);
    const uint32_t magnitude = bits & 0x7fffffffU;
    // Normal results: round the mantissa, rebias the exponent.
    const uint32_t odd = (magnitude >> kShift) & 1U;
    const uint32_t rounded = magnitude + ((1U << (kShift - 1)) - 1) + odd;
    const uint32_t normal = (rounded - (static_cast<uint32_t>(127 - kBias) << 23)) >> kShift;
    // Subnormal results: `magic` is a power of two whose last mantissa bit has the same weight as
    // that of the result, so adding it rounds to the precision of the result.
    const uint32_t magic = static_cast<uint32_t>(127 - kBias + kShift + 1) << 23;
    const uint32_t subnormal = float_bits(bits_float(magnitude) + bits_float(magic)) - magic;
    const bool is_small = magnitude < (static_cast<uint32_t>(128 - kBias) << 23);
    uint32_t result = is_small ? subnormal : normal;
    const uint32_t largest = kSaturate ? kMaxFinite : kInfinity;
    const bool too_large = result > largest || magnitude >= kFloatInfinity;
    result = too_large ? largest : result;
    result = magnitude > kFloatInfinity ? kNan : result;
    return static_cast<Storage>(sign | result);
  }
};

template <>
struct Format<DType::kFloat16> : SmallFloat<5, 10, false, false, uint16_t> {};
template <>
struct Format<DType::kFloat8E4M3> : SmallFloat<4, 3, true, true, uint8_t> {};
template <>
struct Format<DType::kFloat8E5M2> : SmallFloat<5, 2, false, true, uint8_t> {};

/// fp8_ds_mla has rows of bytes, which load_ds_mla() widens as a whole.
template <>
struct Format<DType::kFp8DsMla> {
  using Storage = uint8_t;
};

/// Widens the 576 dims of an fp8_ds_mla key. The products with scales are rounded to float32.
FLASHPLAN_INLINE void load_ds_mla(const uint8_t* from, float* to) {
  constexpr int32_t kDimsOfScale = 128;
  constexpr int32_t kNumScales = kDsMlaScaledDims / kDimsOfScale;
  constexpr int32_t kNumTail = kDsMlaDims - kDsMlaScaledDims;
  float scales[kNumScales];
  uint16_t tail[kNumTail];
  __builtin_memcpy(scales, from + kDsMlaScaledDims, sizeof(scales));
  __builtin_memcpy(tail, from + kDsMlaScaledDims + sizeof(scales), sizeof(tail));
  for (int32_t i = 0; i < kNumScales; ++i) {
    for (int32_t d = i * kDimsOfScale; d < (i + 1) * kDimsOfScale; ++d) {
      to[d] = Format<DType::kFloat8E4M3>::load(from[d]) * scales[i];
    }
  }
  for (int32_t d = 0; d < kNumTail; ++d) {
    to[kDsMlaScaledDims + d] = Format<DType::kBFloat16>::load(tail[d]);
  }
}

/// Calls `body` with the Format of float16, bfloat16 or float32.
template <typename Body>
FLASHPLAN_INLINE void dispatch_wide_format(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16: return body(Format<DType::kFloat16>());
    case DType::kBFloat16: return body(Format<DType::kBFloat16>());
    case DType::kFloat32: return body(Format<DType::kFloat32>());
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt32:
    case DType::kFp8DsMla: break;  // callers have refused these
  }
}

/// Calls `body` with the Format in which an operator stores results: that of `dtype` if it is an
/// 8-bit float, else `From`, the Format of what the operator reads.
template <typename From, typename Body>
FLASHPLAN_INLINE void dispatch_stored_format(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat8E4M3: return body(Format<DType::kFloat8E4M3>());
    case DType::kFloat8E5M2: return body(Format<DType::kFloat8E5M2>());
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16: return body(From());
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt32:
    case DType::kFp8DsMla: break;  // callers have refused these
  }
}

/// Calls `body` with the Format of one of the five float dtypes.
template <typename Body>
FLASHPLAN_INLINE void dispatch_format(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32: return body(Format<DType::kFloat32>());
    case DType::kFloat16: return body(Format<DType::kFloat16>());
    case DType::kBFloat16: return body(Format<DType::kBFloat16>());
    case DType::kFloat8E4M3: return body(Format<DType::kFloat8E4M3>());
    case DType::kFloat8E5M2: return body(Format<DType::kFloat8E5M2>());
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt32:
    case DType::kFp8DsMla: break;
  }
  __builtin_unreachable();  // callers have checked the dtype
}

}  // namespace flashplan::cpu
