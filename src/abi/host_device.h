// SPDX-License-Identifier: Apache-2.0
// For functions that the host and the GPU both call.
#pragma once

// Always inline: the CPU kernel is compiled once per instruction set, and a copy with external
// linkage could bring one set's instructions to another.
#ifdef __CUDACC__
#define FLASHPLAN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHPLAN_HOST_DEVICE [[gnu::always_inline]] inline
#endif
