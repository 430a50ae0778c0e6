// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that go on while the threads do something else (PTX ISA 8.0:
// cp.async.bulk and mbarriers; GPUs of compute capability 9.0).
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/cuda/sample/mbarrier.h"

namespace flashplan::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasBulkCopies = true;
#else
constexpr bool kHasBulkCopies = false;
#endif

/// Starts to fetch `bytes` bytes from the address `from` into L2. The address and the number of
/// bytes are multiples of 16.
__device__ inline void bulk_prefetch(const void* from, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (bytes > 0)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(from), "r"(bytes));
#else
  (void)from;
  (void)bytes;
#endif
}

/// An mbarrier in shared memory, which tells the threads of a CTA that a copy has arrived.
class BulkBarrier {
 public:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  /// The thread that starts the copy calls it, then fence_init(). A barrier of the CTA must follow
  /// before other threads wait.
  __device__ void init() { mbarrier_init(&state_); }
  static __device__ void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::
                     : "memory");
  }
  /// Starts the one copy of this barrier. Addresses and bytes are multiples of 16.
  __device__ void copy(void* to, const void* from, uint32_t bytes) {
    mbarrier_expect(&state_, bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&state_))
        : "memory");
  }
  /// Waits until the copy has arrived.
  __device__ void wait() { mbarrier_wait(&state_, 0); }

 private:
#else
  // For the emulator of the tests, where copy() copies at once. Older GPUs make no bulk copies.
  __device__ void init() {}
  static __device__ void fence_init() {}
  __device__ void copy(void* to, const void* from, uint32_t bytes) { memcpy(to, from, bytes); }
  __device__ void wait() {}

 private:
#endif
  uint64_t state_;
};

}  // namespace flashplan::cuda
