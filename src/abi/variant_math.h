// SPDX-License-Identifier: Apache-2.0
// The functions that bodies of a user's variant have; those that engines make each in its way are
// in variant_math.h of cpu and kernels/device. Included by generated source only, inside a
// namespace of its own; what begins with :: is of the compiler.

FLASHPLAN_DEVICE float pow(float x, float y) { return ::powf(x, y); }
FLASHPLAN_DEVICE float erf(float x) { return ::erff(x); }
FLASHPLAN_DEVICE float floor(float x) { return ::floorf(x); }
FLASHPLAN_DEVICE float ceil(float x) { return ::ceilf(x); }

// The result has the type of both arguments, or the one that C++ converts them to. Each return type
// is written with the operators of the body, so that an argument of a type without them is an error
// at the user's line, not in these bodies.
template <typename A>
FLASHPLAN_DEVICE auto abs(A x) -> decltype(x < 0 ? -x : x) {
  return x < 0 ? -x : x;
}
template <typename A, typename B>
FLASHPLAN_DEVICE auto min(A a, B b) -> decltype(b < a ? A() + B() : A() + B()) {
  return b < a ? b : a;
}
template <typename A, typename B>
FLASHPLAN_DEVICE auto max(A a, B b) -> decltype(a < b ? A() + B() : A() + B()) {
  return a < b ? b : a;
}
