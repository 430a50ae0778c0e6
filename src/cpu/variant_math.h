// SPDX-License-Identifier: Apache-2.0
// Functions that bodies of variants may call, besides those of abi/variant_math.h: on the CPU they
// are those of the C library. Only generated source includes this file, inside a namespace.

FLASHPLAN_DEVICE float infinity() { return __builtin_inff(); }
FLASHPLAN_DEVICE float exp2(float x) { return ::exp2f(x); }
FLASHPLAN_DEVICE float exp(float x) { return ::expf(x); }
FLASHPLAN_DEVICE float log2(float x) { return ::log2f(x); }
FLASHPLAN_DEVICE float log(float x) { return ::logf(x); }
FLASHPLAN_DEVICE float tanh(float x) { return ::tanhf(x); }
FLASHPLAN_DEVICE float sqrt(float x) { return ::sqrtf(x); }
FLASHPLAN_DEVICE float rsqrt(float x) { return 1.0F / ::sqrtf(x); }
FLASHPLAN_DEVICE float sin(float x) { return ::sinf(x); }
FLASHPLAN_DEVICE float cos(float x) { return ::cosf(x); }
