// SPDX-License-Identifier: Apache-2.0
// Functions of abi/variant_math.h by the GPU's own instructions. Their relative error is about
// 1e-6, far below the precision of 16-bit tensors. Included by generated source only, inside a
// namespace.

FLASHPLAN_DEVICE float infinity() { return device::infinity(); }
FLASHPLAN_DEVICE float exp2(float x) { return exp2_fast(x); }
FLASHPLAN_DEVICE float exp(float x) { return exp2_fast(x * kLog2e); }
FLASHPLAN_DEVICE float log2(float x) { return log2_fast(x); }
FLASHPLAN_DEVICE float log(float x) { return log2_fast(x) * kLn2; }
FLASHPLAN_DEVICE float tanh(float x) { return tanh_fast(x); }
FLASHPLAN_DEVICE float sqrt(float x) { return ::sqrtf(x); }
FLASHPLAN_DEVICE float rsqrt(float x) { return ::rsqrtf(x); }

/// x less the nearest multiple of 2 pi. It is computed in float64: in float32 the code for any x is
/// long, and the compiler repeats it for each of a thread's logits.
FLASHPLAN_DEVICE float reduced_angle(float x) {
  const double turns = ::rint(x * 0.15915494309189535);
  return static_cast<float>(::fma(turns, -6.283185307179586, static_cast<double>(x)));
}
FLASHPLAN_DEVICE float sin(float x) { return ::__sinf(reduced_angle(x)); }
FLASHPLAN_DEVICE float cos(float x) { return ::__cosf(reduced_angle(x)); }
