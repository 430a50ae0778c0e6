// SPDX-License-Identifier: Apache-2.0
// Symbol visibility: the shared library exports exactly what is marked FLASHPLAN_API.
#pragma once

#if defined(FLASHPLAN_STATIC)
#define FLASHPLAN_API
#else
#define FLASHPLAN_API __attribute__((visibility("default")))
#endif
