// SPDX-License-Identifier: Apache-2.0
// The functions that bodies of a user's variant have, the same on the CPU and on a GPU. Included by
// generated source only, inside a namespace of its own; what begins with :: is of the compiler.

FLASHPLAN_DEVICE float infinity() { return __builtin_huge_valf(); }
FLASHPLAN_DEVICE float exp(float x) { return ::expf(x); }
FLASHPLAN_DEVICE float exp2(float x) { return ::exp2f(x); }
FLASHPLAN_DEVICE float log(float x) { return ::logf(x); }
FLASHPLAN_DEVICE float log2(float x) { return ::log2f(x); }
FLASHPLAN_DEVICE float tanh(float x) { return ::tanhf(x); }
FLASHPLAN_DEVICE float sqrt(float x) { return ::sqrtf(x); }
FLASHPLAN_DEVICE float rsqrt(float x) { return 1.0F / ::sqrtf(x); }
FLASHPLAN_DEVICE float pow(float x, float y) { return ::powf(x, y); }
FLASHPLAN_DEVICE float sin(float x) { return ::sinf(x); }
FLASHPLAN_DEVICE float cos(float x) { return ::cosf(x); }
FLASHPLAN_DEVICE float erf(float x) { return ::erff(x); }
FLASHPLAN_DEVICE float floor(float x) { return ::floorf(x); }
FLASHPLAN_DEVICE float ceil(float x) { return ::ceilf(x); }

// Of the type that both arguments have, or that C++ converts them to.
template <typename A>
FLASHPLAN_DEVICE A abs(A x) {
  return x < 0 ? -x : x;
}
template <typename A, typename B>
FLASHPLAN_DEVICE auto min(A a, B b) -> decltype(A() + B()) {
  return b < a ? b : a;
}
template <typename A, typename B>
FLASHPLAN_DEVICE auto max(A a, B b) -> decltype(A() + B()) {
  return a < b ? b : a;
}
