// SPDX-License-Identifier: Apache-2.0
// A vector of floats as wide as the instruction set, in the compiler's own vector extension.
// This file is included inside the namespace of an instruction set.

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), may_alias));
typedef uint32_t BitsVec __attribute__((vector_size(kLanes * sizeof(float)), may_alias));

FLASHPLAN_INLINE Vec load(const float* aligned) { return *reinterpret_cast<const Vec*>(aligned); }
FLASHPLAN_INLINE void store(float* aligned, Vec v) { *reinterpret_cast<Vec*>(aligned) = v; }
FLASHPLAN_INLINE Vec splat(float x) { return x - Vec{}; }
/// The larger of each lane; b where either is NaN.
FLASHPLAN_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

template <int... kIndex>
struct Indices {};
template <int kCount, int... kIndex>
struct MakeIndices : MakeIndices<kCount - 1, kCount - 1, kIndex...> {};
template <int... kIndex>
struct MakeIndices<0, kIndex...> {
  using type = Indices<kIndex...>;
};

/// Adds the upper half of each segment of kSegment lanes of `a` and `b` to its lower half. The
/// result has the segments of `a`, then those of `b`, each with half as many lanes and the same sum
/// of lanes.
template <int kSegment, int... kIndex>
FLASHPLAN_INLINE Vec add_halves(Vec a, Vec b, Indices<kIndex...>) {
  constexpr int kHalf = kSegment / 2;
  return __builtin_shufflevector(a, b, (kIndex / kHalf * kSegment + kIndex % kHalf)...) +
         __builtin_shufflevector(a, b, (kIndex / kHalf * kSegment + kIndex % kHalf + kHalf)...);
}

/// Lane i of the result is the sum of the lanes of v[i], always added in the same order.
template <int kCount = kLanes>
FLASHPLAN_INLINE Vec sum_lanes(Vec (&v)[kLanes]) {
  if constexpr (kCount == 1) {
    return v[0];
  } else {
    // Vectors 2i and 2i + 1 are combined, so the sum of the lanes of v[i] ends up in lane i.
    for (int i = 0; i < kCount / 2; ++i) {
      v[i] = add_halves<kCount>(v[2 * i], v[2 * i + 1], typename MakeIndices<kLanes>::type());
    }
    return sum_lanes<kCount / 2>(v);
  }
}

template <int kDistance, int... kIndex>
FLASHPLAN_INLINE Vec rotate(Vec v, Indices<kIndex...>) {
  return __builtin_shufflevector(v, v, ((kIndex + kDistance) % kLanes)...);
}

template <int kDistance = kLanes / 2>
FLASHPLAN_INLINE float max_lane(Vec v) {
  if constexpr (kDistance == 0) {
    return v[0];
  } else {
    const Vec rotated = rotate<kDistance>(v, typename MakeIndices<kLanes>::type());
    return max_lane<kDistance / 2>(max(v, rotated));
  }
}

template <int kDistance = kLanes / 2>
FLASHPLAN_INLINE float sum_of_lanes(Vec v) {
  if constexpr (kDistance == 0) {
    return v[0];
  } else {
    const Vec rotated = rotate<kDistance>(v, typename MakeIndices<kLanes>::type());
    return sum_of_lanes<kDistance / 2>(v + rotated);
  }
}

/// e^x to about 2 ulp for x <= 88; 0 below -87, where float32 has no normal result; NaN for NaN.
FLASHPLAN_INLINE Vec exp(Vec x) {
  const Vec clamped = x < -87.0F ? splat(-87.0F) : x;  // keeps NaN
  // x = n ln 2 + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 + 127 to x / ln 2 rounds it to n, and
  // leaves n + 127, which is the exponent of 2^n, in the low bits.
  const Vec magic = splat(12582912.0F + 127.0F);
  const Vec shifted = clamped * 1.44269504F + magic;
  const Vec n = shifted - magic;
  const Vec r = (clamped - n * 0.693359375F) + n * 2.12194440e-4F;
  // Taylor's coefficients to degree 7: the remainder is below 6e-9 of the result.
  Vec p = splat(1.0F / 5040);
  p = p * r + 1.0F / 720;
  p = p * r + 1.0F / 120;
  p = p * r + 1.0F / 24;
  p = p * r + 1.0F / 6;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  // Multiplying by 2^n keeps NaN; adding n to the exponent bits would not.
  const Vec power = reinterpret_cast<Vec>(reinterpret_cast<BitsVec>(shifted) << 23);
  return x < -87.0F ? Vec{} : p * power;
}

/// cap * tanh(x / cap) to about 1.5 ulp of the result, for any normal cap.
FLASHPLAN_INLINE Vec soft_cap(Vec x, float cap) {
  const Vec ratio = x / cap;  // divided, because 1 / cap may be subnormal
  const Vec magnitude = ratio < 0.0F ? -ratio : ratio;
  // Far from 0 the result is cap * (1 - 2 / (e^2|ratio| + 1)), in a form that does not overflow.
  const Vec e = exp(magnitude * -2.0F);
  const Vec far = cap - cap * ((e + e) / (1.0F + e));
  // Near 0 the difference above would cancel. There an odd polynomial is used, fitted to tanh on
  // [0, 0.9] with a relative error of 1e-9. Its first term is x itself, without the error of ratio.
  const Vec z = ratio * ratio;
  Vec p = splat(-4.590739e-4F);
  p = p * z + 2.592804e-3F;
  p = p * z - 8.2756635e-3F;
  p = p * z + 2.1669546e-2F;
  p = p * z - 5.3930942e-2F;
  p = p * z + 1.3332999e-1F;
  p = p * z - 3.3333322e-1F;
  const Vec near = x + x * (z * p);
  return magnitude < 0.9F ? near : (x < 0.0F ? -far : far);
}
