// SPDX-License-Identifier: Apache-2.0
// The specifiers of functions that both the host and the GPU call.
#pragma once

// Such functions are always inlined, because the CPU kernel is compiled once per instruction set.
// If a function were not inlined, the linker would keep one of its copies for all sets, perhaps one
// with instructions that the machine does not have.
#ifdef __CUDACC__
#define FLASHPLAN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHPLAN_HOST_DEVICE [[gnu::always_inline]] inline
#endif
