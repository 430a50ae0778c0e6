// SPDX-License-Identifier: Apache-2.0
// CTAs of a cluster send each other values by st.async (PTX ISA 8.1; GPUs of compute capability
// 9.0): the store also counts its bytes on an mbarrier of the receiver. With plain stores and a
// barrier of the cluster, each thread would wait at the barrier until its stores are visible to the
// whole GPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/cuda/sample/cluster.h"
#include "ops/cuda/sample/mbarrier.h"

namespace flashplan::cuda {

/// Counts, in shared memory, the bytes that the CTAs of a cluster send to this one. It is used in
/// rounds: one thread says how many bytes a round has, and the threads that read them wait.
class Mailbox {
 public:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  /// One thread calls it, then fence_init(). A barrier of the cluster must follow before others
  /// send.
  __device__ void init() { mbarrier_init(&state_); }
  static __device__ void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  /// How many bytes all messages of this round have. Some may have come already.
  __device__ void expect(uint32_t bytes) { mbarrier_expect(&state_, bytes); }
  /// Waits until all bytes of a round have come. `parity`: 0 for the first round, 1 for the second,
  /// and so on in turn.
  __device__ void wait(uint32_t parity) { mbarrier_wait(&state_, parity); }
  /// Writes `value` in CTA `rank` to the variable that is `to` in this CTA. That CTA's mailbox
  /// counts the bytes.
  __device__ void send(uint64_t* to, uint64_t value, int rank) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];\n" ::"r"(
            address_in(rank, to)),
        "l"(value), "r"(address_in(rank, &state_))
        : "memory");
  }
  /// Sends `first` to `to`, and `second` to the 8 bytes behind it. `to` is aligned to 16 bytes.
  __device__ void send(void* to, uint64_t first, uint64_t second, int rank) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, "
        "[%3];\n" ::"r"(address_in(rank, to)),
        "l"(first), "l"(second), "r"(address_in(rank, &state_))
        : "memory");
  }

 private:
  static __device__ uint32_t address_in(int rank, const void* shared) {
    uint32_t result;
    asm("mapa.shared::cluster.u32 %0, %1, %2;\n"
        : "=r"(result)
        : "r"(shared_address(shared)), "r"(rank));
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
