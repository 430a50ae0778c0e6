// SPDX-License-Identifier: Apache-2.0
// Converts many elements at a time. For float16 it uses conversion instructions that compilers do
// not use by themselves. Only kernels.cpp includes this file, inside the namespace of an
// instruction set.

template <typename Format>
inline constexpr bool kIsHalf = std::is_same_v<Format, cpu::Format<DType::kFloat16>>;

/// to[i] = Format::load(from[i]).
template <typename Format>
FLASHPLAN_INLINE void load_all(const typename Format::Storage* from, int32_t count, float* to) {
  int32_t first = 0;
#if defined(__F16C__)
  if constexpr (kIsHalf<Format>) {
    for (; first + 8 <= count; first += 8) {
      const auto* half = reinterpret_cast<const __m128i*>(from + first);
      _mm256_storeu_ps(to + first, _mm256_cvtph_ps(_mm_loadu_si128(half)));
    }
  }
#endif
#pragma omp simd
  for (int32_t i = first; i < count; ++i) to[i] = Format::load(from[i]);
}

/// to[i] = Format::store(value(i)), where value(i) may read to[i].
template <typename Format, typename Value>
FLASHPLAN_INLINE void store_each(typename Format::Storage* to, int32_t count, const Value& value) {
  int32_t first = 0;
#if defined(__F16C__)
  if constexpr (kIsHalf<Format>) {
    constexpr int32_t kBlock = 64;
    alignas(64) float block[kBlock];
    for (; first + kBlock <= count; first += kBlock) {
#pragma omp simd
      for (int32_t i = 0; i < kBlock; ++i) block[i] = value(first + i);
      for (int32_t i = 0; i < kBlock; i += 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + first + i),
                         _mm256_cvtps_ph(_mm256_load_ps(block + i), _MM_FROUND_TO_NEAREST_INT));
      }
    }
  }
#endif
#pragma omp simd
  for (int32_t i = first; i < count; ++i) to[i] = Format::store(value(i));
}
