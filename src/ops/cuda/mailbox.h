// SPDX-License-Identifier: Apache-2.0
// Messages between the CTAs of a cluster (PTX ISA 8.1: st.async; GPUs of compute capability 9.0). A
// barrier of the cluster that also orders memory would make each thread wait until all that it has
// written is visible on the whole GPU; a message brings its data and the news of its arrival
// together.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/cuda/cluster.h"

namespace flashplan::cuda {

/// Receives messages in rounds, in shared memory. In each round one thread of the CTA says how many
/// bytes come, and all threads that need them wait.
class Mailbox {
 public:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  /// By one thread. fence_init() follows, and a barrier of the cluster before others send.
  __device__ void init() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(address(&state_)) : "memory");
  }
  static __device__ void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  /// How many bytes all messages of this round have. Some may have come already.
  __device__ void expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(address(&state_)),
                 "r"(bytes)
                 : "memory");
  }
  /// Waits for the end of a round. `parity`: of the number of rounds before.
  __device__ void wait(uint32_t parity) {
    uint32_t done;
    do {
      asm volatile(
          "{\n.reg .pred done;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
          : "=r"(done)
          : "r"(address(&state_)), "r"(parity)
          : "memory");
    } while (done == 0);
  }
  /// Writes `value` in CTA `rank` to the variable that is `to` in this CTA. The mailbox is that of
  /// the other CTA.
  __device__ void send(uint64_t* to, uint64_t value, int rank) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];\n" ::"r"(
            address_in(rank, to)),
        "l"(value), "r"(address_in(rank, &state_))
        : "memory");
  }
  /// Two values at a multiple of 16 bytes.
  __device__ void send(void* to, uint64_t first, uint64_t second, int rank) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, "
        "[%3];\n" ::"r"(address_in(rank, to)),
        "l"(first), "l"(second), "r"(address_in(rank, &state_))
        : "memory");
  }

 private:
  static __device__ uint32_t address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }
  static __device__ uint32_t address_in(int rank, const void* shared) {
    uint32_t result;
    asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(result) : "r"(address(shared)), "r"(rank));
    return result;
  }
#else
  // A cluster is one CTA.
  __device__ void init() {}
  static __device__ void fence_init() {}
  __device__ void expect(uint32_t /*bytes*/) {}
  __device__ void wait(uint32_t /*parity*/) { __syncthreads(); }
  __device__ void send(uint64_t* to, uint64_t value, int /*rank*/) { *to = value; }
  __device__ void send(void* to, uint64_t first, uint64_t second, int /*rank*/) {
    memcpy(to, &first, sizeof(first));
    memcpy(static_cast<char*>(to) + sizeof(first), &second, sizeof(second));
  }

 private:
#endif
  uint64_t state_;
};

}  // namespace flashplan::cuda
