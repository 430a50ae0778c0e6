// SPDX-License-Identifier: Apache-2.0
// offsetof() for device code.
#pragma once

// NVRTC up to 13.2 has neither offsetof nor __builtin_offsetof, but the operator __INTADDR__ of its
// front end, which turns the address of a member into a constant.
#ifdef __CUDACC_RTC__
#define FLASHPLAN_OFFSET_OF(type, member) static_cast<int>(__INTADDR__(&((type*)0)->member))
#else
#define FLASHPLAN_OFFSET_OF(type, member) static_cast<int>(__builtin_offsetof(type, member))
#endif
