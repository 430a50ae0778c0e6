// SPDX-License-Identifier: Apache-2.0
// Conversions between dtypes and float on the GPU, and words: vectors of elements that one
// instruction moves.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/error.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "ops/rows.h"

namespace flashplan::cuda {

/// Storage and conversions of a dtype: load() widens exactly; store() rounds to nearest even, and
/// saturates in the 8-bit formats.
template <DType>
struct Format;

template <>
struct Format<DType::kFloat32> {
  using Storage = float;
  static __device__ float load(Storage x) { return x; }
  static __device__ Storage store(float x) { return x; }
};

template <>
struct Format<DType::kFloat16> {
  using Storage = __half;
  static __device__ float load(Storage x) { return __half2float(x); }
  static __device__ Storage store(float x) { return __float2half_rn(x); }
};

template <>
struct Format<DType::kBFloat16> {
  using Storage = __nv_bfloat16;
  static __device__ float load(Storage x) {
    return __uint_as_float(static_cast<unsigned>(__bfloat16_as_ushort(x)) << 16);
  }
  static __device__ Storage store(float x) { return __float2bfloat16_rn(x); }
};

template <__nv_fp8_interpretation_t kKind>
struct Float8 {
  using Storage = __nv_fp8_storage_t;
  static __device__ float load(Storage x) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, kKind)));
  }
  static __device__ Storage store(float x) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kKind);
  }
};
template <>
struct Format<DType::kFloat8E4M3> : Float8<__NV_E4M3> {};
template <>
struct Format<DType::kFloat8E5M2> : Float8<__NV_E5M2> {};

template <int kBytes>
struct WordOfBytes;
template <>
struct WordOfBytes<1> {
  using Type = unsigned char;
};
template <>
struct WordOfBytes<2> {
  using Type = unsigned short;
};
template <>
struct WordOfBytes<4> {
  using Type = unsigned int;
};
template <>
struct WordOfBytes<8> {
  using Type = uint2;
};
template <>
struct WordOfBytes<16> {
  using Type = uint4;
};

/// A word of `kVec` elements of a dtype, which one instruction moves.
template <DType kDType, int kVec>
using Word = typename WordOfBytes<kVec* static_cast<int>(item_size(kDType))>::Type;

/// The number of elements in a 16-byte word.
template <DType kDType>
inline constexpr int kWordElements = 16 / static_cast<int>(item_size(kDType));

template <DType kDType, int kVec>
__device__ void unpack(Word<kDType, kVec> word, float (&values)[kVec]) {
  typename Format<kDType>::Storage elements[kVec];
  static_assert(sizeof(elements) == sizeof(word));
  __builtin_memcpy(elements, &word, sizeof(word));
  for (int i = 0; i < kVec; ++i) values[i] = Format<kDType>::load(elements[i]);
}

template <DType kDType, int kVec>
__device__ Word<kDType, kVec> pack(const float (&values)[kVec]) {
  typename Format<kDType>::Storage elements[kVec];
  for (int i = 0; i < kVec; ++i) elements[i] = Format<kDType>::store(values[i]);
  Word<kDType, kVec> word;
  __builtin_memcpy(&word, elements, sizeof(word));
  return word;
}

/// The elements of `word`, divided by `scale`, as a word of another dtype.
template <DType kFrom, DType kTo, int kVec>
__device__ Word<kTo, kVec> narrowed(Word<kFrom, kVec> word, float scale) {
  float values[kVec];
  unpack<kFrom, kVec>(word, values);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = __fdiv_rn(values[i], scale);
  return pack<kTo, kVec>(values);
}

/// Whether `data` and all strides (in bytes) are multiples of `bytes`, so that aligned words of
/// `bytes` bytes can be moved.
template <class... Strides>
bool is_aligned(const void* data, int bytes, Strides... strides) {
  const auto mask = static_cast<uint64_t>(bytes - 1);
  return ((reinterpret_cast<uint64_t>(data) | ... | static_cast<uint64_t>(strides)) & mask) == 0;
}

/// Whether all rows of a tensor begin at multiples of `bytes` bytes.
inline bool is_aligned(const Rows& rows, int bytes) {
  return is_aligned(rows.data, bytes, rows.stride[0], rows.stride[1], rows.stride[2]);
}

/// Calls `body` with the dtype, one of the three that operators compute in, as a compile-time
/// constant.
///   kInvalidType  another dtype; callers have refused these
template <class Body>
Status with_float(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16: return body(std::integral_constant<DType, DType::kFloat16>());
    case DType::kBFloat16: return body(std::integral_constant<DType, DType::kBFloat16>());
    case DType::kFloat32: return body(std::integral_constant<DType, DType::kFloat32>());
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt32:
    case DType::kFp8DsMla: break;
  }
  return error(StatusCode::kInvalidType, "dtype: expected float32, float16 or bfloat16, got %s",
               to_string(dtype));
}

/// Calls `body` with the dtype that an operator on kFrom stores, as a compile-time constant: kFrom
/// itself, or an 8-bit float.
///   kInvalidType  another dtype; callers have refused these
template <DType kFrom, class Body>
Status with_stored(DType dtype, const Body& body) {
  if (dtype == kFrom) return body(std::integral_constant<DType, kFrom>());
  switch (dtype) {
    case DType::kFloat8E4M3: return body(std::integral_constant<DType, DType::kFloat8E4M3>());
    case DType::kFloat8E5M2: return body(std::integral_constant<DType, DType::kFloat8E5M2>());
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt32:
    case DType::kFp8DsMla: break;
  }
  return error(StatusCode::kInvalidType, "dtype: expected %s or an 8-bit float, got %s",
               to_string(kFrom), to_string(dtype));
}

}  // namespace flashplan::cuda
