// SPDX-License-Identifier: Apache-2.0
// offsetof() for device code.
#pragma once

// NVRTC 13.2 and older versions have neither offsetof nor __builtin_offsetof. They have
// __INTADDR__, by which their front end defines offsetof.
#ifdef __CUDACC_RTC__
#define FLASHPLAN_OFFSET_OF(type, member) static_cast<int>(__INTADDR__(&((type*)0)->member))
#else
#define FLASHPLAN_OFFSET_OF(type, member) static_cast<int>(__builtin_offsetof(type, member))
#endif
