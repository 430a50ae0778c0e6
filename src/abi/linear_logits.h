// SPDX-License-Identifier: Apache-2.0
// Recognises bodies of logits that add a linear function of the key to x, such as ALiBi's.
//
// The compiler sees the body twice: with `float x` and `int key`, and as a template with the types
// below in their place. These types have only operators whose result is linear in the key again. So
// a body that compiles with them is linear, and what it returns are the coefficients.
#pragma once

#include "abi/host_device.h"
#include "abi/variant.h"

namespace flashplan {

/// Numbers that do not depend on x or the key. Unsigned ones are left out, since they wrap around.
template <typename T>
inline constexpr bool kIsNumber = false;
template <>
inline constexpr bool kIsNumber<int> = true;
template <>
inline constexpr bool kIsNumber<float> = true;
template <>
inline constexpr bool kIsNumber<double> = true;

template <typename T>
inline constexpr bool kIsInt = false;
template <>
inline constexpr bool kIsInt<int> = true;

/// rest + slope * (k - key) for any key k near a given one. T is the type that the expression has
/// for a key of type int.
template <typename T>
struct OfKey {
  T slope;
  T rest;
};
template <typename T>
inline constexpr bool kIsOfKey = false;
template <typename T>
inline constexpr bool kIsOfKey<OfKey<T>> = true;

/// x plus a function of the key.
struct BiasedLogit {
  OfKey<float> bias;
};

template <typename T>
concept Number = kIsNumber<T>;
template <typename T>
concept Linear = kIsNumber<T> || kIsOfKey<T>;

/// Converts a number, or a function of the key, to a function with coefficients of type T.
template <typename T, Number A>
FLASHPLAN_HOST_DEVICE OfKey<T> of_key(A x) {
  return {T(), static_cast<T>(x)};
}
template <typename T, typename A>
FLASHPLAN_HOST_DEVICE OfKey<T> of_key(OfKey<A> x) {
  return {static_cast<T>(x.slope), static_cast<T>(x.rest)};
}
/// The type of the numbers in an expression: T itself, or that of the coefficients.
template <typename T>
struct NumberIn {
  using Type = T;
};
template <typename T>
struct NumberIn<OfKey<T>> {
  using Type = T;
};
/// The type of the numbers in the sum of an A and a B.
template <typename A, typename B>
using Common = decltype(typename NumberIn<A>::Type() + typename NumberIn<B>::Type());

template <Linear A, Linear B>
  requires(kIsOfKey<A> || kIsOfKey<B>)
FLASHPLAN_HOST_DEVICE OfKey<Common<A, B>> operator+(A a, B b) {
  const auto x = of_key<Common<A, B>>(a);
  const auto y = of_key<Common<A, B>>(b);
  return {x.slope + y.slope, x.rest + y.rest};
}
template <Linear A, Linear B>
  requires(kIsOfKey<A> || kIsOfKey<B>)
FLASHPLAN_HOST_DEVICE OfKey<Common<A, B>> operator-(A a, B b) {
  const auto x = of_key<Common<A, B>>(a);
  const auto y = of_key<Common<A, B>>(b);
  return {x.slope - y.slope, x.rest - y.rest};
}
template <typename T>
FLASHPLAN_HOST_DEVICE OfKey<T> operator-(OfKey<T> a) {
  return {-a.slope, -a.rest};
}
template <typename A, Number B>
FLASHPLAN_HOST_DEVICE OfKey<Common<A, B>> operator*(OfKey<A> a, B b) {
  const auto x = of_key<Common<A, B>>(a);
  const auto factor = static_cast<Common<A, B>>(b);
  return {x.slope * factor, x.rest * factor};
}
template <Number A, typename B>
FLASHPLAN_HOST_DEVICE OfKey<Common<A, B>> operator*(A a, OfKey<B> b) {
  return b * a;
}
/// Not of integers, whose quotients are rounded.
template <typename A, Number B>
  requires(!kIsInt<Common<A, B>>)
FLASHPLAN_HOST_DEVICE OfKey<Common<A, B>> operator/(OfKey<A> a, B b) {
  const auto x = of_key<Common<A, B>>(a);
  const auto divisor = static_cast<Common<A, B>>(b);
  return {x.slope / divisor, x.rest / divisor};
}

template <Linear T>
FLASHPLAN_HOST_DEVICE BiasedLogit operator+(BiasedLogit x, T b) {
  return {x.bias + of_key<float>(b)};
}
template <Linear T>
FLASHPLAN_HOST_DEVICE BiasedLogit operator+(T a, BiasedLogit x) {
  return x + a;
}
template <Linear T>
FLASHPLAN_HOST_DEVICE BiasedLogit operator-(BiasedLogit x, T b) {
  return {x.bias - of_key<float>(b)};
}

/// Whether logits_of(), the body as a template, is linear.
template <typename Bodies>
concept HasLinearLogits = requires(const Bodies& bodies, BiasedLogit x, OfKey<int> key) {
  bodies.logits_of(x, 0, 0, key, 0, 0, 0, 0).bias;
};

/// UserVariant with bias(), which may be called if kIsLinear.
template <typename UserVariant, typename Bodies>
struct Biased : UserVariant {
  static constexpr bool kIsLinear = HasLinearLogits<Bodies>;
  using UserVariant::UserVariant;

  /// What the body adds to x at a position (rest), and by how much more it adds from key to key
  /// (slope).
  FLASHPLAN_HOST_DEVICE OfKey<float> bias(const LogitPosition& at) const {
    const OfKey<int> key = {1, at.key};
    return Bodies{this->bodies}
        .logits_of(BiasedLogit(), at.request, at.query, key, at.qo_head, at.kv_head, at.qo_len,
                   at.kv_len)
        .bias;
  }
};

}  // namespace flashplan
