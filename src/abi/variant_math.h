// SPDX-License-Identifier: Apache-2.0
// Functions that the bodies of a user's variant may call. Those that differ between CPU and GPU are
// in cpu/variant_math.h and kernels/device/variant_math.h. Only generated source includes this
// file, inside a namespace of its own; functions with a leading :: are the C library's or NVRTC's.

FLASHPLAN_DEVICE float pow(float x, float y) { return ::powf(x, y); }
FLASHPLAN_DEVICE float erf(float x) { return ::erff(x); }
FLASHPLAN_DEVICE float floor(float x) { return ::floorf(x); }
FLASHPLAN_DEVICE float ceil(float x) { return ::ceilf(x); }

// The result has the common type of the arguments. The return types use the operators of the
// function bodies. If an argument's type lacks an operator, the compiler then reports the user's
// line and not a line of these functions.
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
