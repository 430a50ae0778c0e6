// SPDX-License-Identifier: Apache-2.0
// Gated activations of rows. Only kernels.cpp includes this file, inside the namespace of an
// instruction set.

/// 1 / (1 + e^-x), but 0 for x < -87, where it is less than 2e-38. Callers multiply it by x, which
/// may be as low as -3e38, and the product must be 0 there.
FLASHPLAN_INLINE Vec sigmoid(Vec x) {
  const Vec minus = -x;
  const Vec result = 1.0F / (1.0F + exp(minus > 87.0F ? splat(87.0F) : minus));
  return minus > 87.0F ? splat(0.0F) : result;
}

/// (1 + erf(x / sqrt(2))) / 2, with a relative error of about 1e-6 for negative x too: the
/// Chebyshev fit of erfc in Numerical Recipes, 6.2.
FLASHPLAN_INLINE Vec normal_cdf(Vec x) {
  const Vec z = (x < 0.0F ? -x : x) * 0.70710678F;
  const Vec t = 1.0F / (1.0F + 0.5F * z);
  Vec p = splat(0.17087277F);
  p = p * t - 0.82215223F;
  p = p * t + 1.48851587F;
  p = p * t - 1.13520398F;
  p = p * t + 0.27886807F;
  p = p * t - 0.18628806F;
  p = p * t + 0.09678418F;
  p = p * t + 0.37409196F;
  p = p * t + 1.00002368F;
  p = p * t - 1.26551223F;
  const Vec half_erfc = 0.5F * t * exp(p - z * z);
  return x < 0.0F ? half_erfc : 1.0F - half_erfc;
}

template <Activation kActivation>
FLASHPLAN_INLINE Vec activate(Vec x) {
  if constexpr (kActivation == Activation::kSilu) return x * sigmoid(x);
  if constexpr (kActivation == Activation::kGelu) return x * normal_cdf(x);
  // (1 + tanh(u)) / 2 = sigmoid(2 u)
  return x * sigmoid(x * (1.5957691F + 0.071354816F * (x * x)));
}

template <typename From, typename To, Activation kActivation>
void activate_row(const ActivationParams& p, int32_t row) {
  constexpr int32_t kBlock = 256;
  alignas(64) float gate[kBlock];
  alignas(64) float up[kBlock];
  const auto* from = reinterpret_cast<const typename From::Storage*>(row_at(p.x, row));
  auto* to = reinterpret_cast<typename To::Storage*>(row_at(p.out, row));
  for (int32_t first = 0; first < p.row_size; first += kBlock) {
    const int32_t count = p.row_size - first < kBlock ? p.row_size - first : kBlock;
    load_all<From>(from + first, count, static_cast<float*>(gate));
    for (int32_t i = count; i % kLanes != 0; ++i) gate[i] = 0.0F;
    load_all<From>(from + p.row_size + first, count, static_cast<float*>(up));
    for (int32_t i = 0; i < count; i += kLanes) {
      store(gate + i, activate<kActivation>(load(gate + i)));
    }
    store_each<To>(to + first, count, [&](int32_t i) { return gate[i] * up[i] / p.scale; });
  }
}

template <typename From, typename To>
void activate_rows(const ActivationParams& p, int32_t begin, int32_t end) {
  const auto for_each = [&](auto activate) {
    for (int32_t row = begin; row < end; ++row) activate(p, row);
  };
  switch (p.activation) {
    case Activation::kSilu: return for_each(activate_row<From, To, Activation::kSilu>);
    case Activation::kGelu: return for_each(activate_row<From, To, Activation::kGelu>);
    case Activation::kGeluTanh: return for_each(activate_row<From, To, Activation::kGeluTanh>);
  }
}

void gated_activation_rows(const ActivationParams& p, int32_t begin, int32_t end) noexcept {
  dispatch_wide_format(p.dtype, [&](auto from) {
    using From = decltype(from);
    dispatch_stored_format<From>(
        p.out_dtype, [&](auto to) { activate_rows<From, decltype(to)>(p, begin, end); });
  });
}
