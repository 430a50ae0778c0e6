// SPDX-License-Identifier: Apache-2.0
// An mbarrier in shared memory that counts bytes which arrive (PTX ISA 8.0; GPUs of compute
// capability 9.0).
#pragma once

#include <cstdint>

namespace flashplan::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

/// A phase of the barrier ends when mbarrier_expect() was called and its bytes have arrived.
__device__ inline void mbarrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(shared_address(barrier))
               : "memory");
}
/// How many bytes arrive in this phase. Some may have arrived already.
__device__ inline void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
/// Waits until a phase has ended. `parity`: 0 for the first phase, 1 for the second, and so on in
/// turn.
__device__ inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
}
#endif

}  // namespace flashplan::cuda
