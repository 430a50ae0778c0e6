// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that go on while the threads do something else (PTX ISA 8.0:
// cp.async.bulk and mbarriers; GPUs of compute capability 9.0).
#pragma once

#include <cstdint>
#include <cstring>

namespace flashplan::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasBulkCopies = true;
#else
constexpr bool kHasBulkCopies = false;
#endif

/// Tells the threads of a CTA that a copy has arrived; in shared memory.
class BulkBarrier {
 public:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  /// By the thread that starts the copy. fence_init() follows, and a barrier of the CTA before
  /// other threads wait.
  __device__ void init() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(address(&state_)) : "memory");
  }
  static __device__ void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::
                     : "memory");
  }
  /// Starts the one copy of this barrier. Addresses and bytes are multiples of 16.
  __device__ void copy(void* to, const void* from, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(address(&state_)),
                 "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(address(to)),
        "l"(from), "r"(bytes), "r"(address(&state_))
        : "memory");
  }
  /// Waits until the bytes are there.
  __device__ void wait() {
    uint32_t done;
    do {
      asm volatile(
          "{\n.reg .pred done;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\nselp.u32 %0, 1, 0, done;\n}\n"
          : "=r"(done)
          : "r"(address(&state_))
          : "memory");
    } while (done == 0);
  }

 private:
  static __device__ uint32_t address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }
#else
  // Where kernels are emulated, a copy is there at once.
  __device__ void init() {}
  static __device__ void fence_init() {}
  __device__ void copy(void* to, const void* from, uint32_t bytes) { memcpy(to, from, bytes); }
  __device__ void wait() {}

 private:
#endif
  uint64_t state_;
};

}  // namespace flashplan::cuda
