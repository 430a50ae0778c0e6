// SPDX-License-Identifier: Apache-2.0
// Hopper's asynchronous instructions as functions (PTX ISA 8.0, sm_90a): mbarriers, bulk tensor
// copies, register reallocation, named barriers.
#pragma once

#include "kernels/device/ptx.h"

namespace flashplan::device {

/// Initialises an mbarrier in shared memory. It completes a phase when `count` arrivals and all
/// expected bytes are there. Waiters name the parity of the phase they wait for: 0 for the first.
FLASHPLAN_DEVICE void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}
/// Makes initialised mbarriers visible to bulk copies; a barrier of the CTA must follow.
FLASHPLAN_DEVICE void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
FLASHPLAN_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
/// Arrives, and makes the phase wait for `bytes` more of bulk copies.
FLASHPLAN_DEVICE void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}
/// Makes the phase wait for `bytes` more of bulk copies.
FLASHPLAN_DEVICE void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
/// Makes the phase wait for `bytes` more of bulk copies, and arrives for `count` threads.
FLASHPLAN_DEVICE void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes, int count) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n"
      "mbarrier.arrive.shared::cta.b64 _, [%0], %2;\n" ::"r"(barrier),
      "r"(bytes), "r"(count)
      : "memory");
}
/// Arrives as soon as all of this thread's cp.async so far have written to shared memory.
FLASHPLAN_DEVICE void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
/// Returns at once whether the phase of this parity is complete.
FLASHPLAN_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
/// Returns whether the phase of this parity is complete. It may first suspend the thread until the
/// phase completes, or until a time limit that the hardware sets.
FLASHPLAN_DEVICE bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
/// Waits for the phase of this parity; a whole warp calls it. Its threads leave the loop together,
/// so that the compiler keeps values that all of them have in uniform registers.
FLASHPLAN_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!__all_sync(0xffffffffU, mbarrier_try_wait(barrier, parity))) {
  }
}

/// A phase of an mbarrier.
struct MbarrierPhase {
  uint32_t barrier;
  uint32_t parity;
};
/// Waits for two phases. The second test starts before the result of the first is there, so that
/// two complete phases take hardly longer than one.
FLASHPLAN_DEVICE void mbarrier_wait(MbarrierPhase a, MbarrierPhase b) {
  bool done;
  do {
    const bool done_a = mbarrier_try_wait(a.barrier, a.parity);
    const bool done_b = mbarrier_try_wait(b.barrier, b.parity);
    done = done_a && done_b;
  } while (!__all_sync(0xffffffffU, done));
}

// CTAs of a cluster, which write to each other's shared memory. An address of shared memory has the
// number of its CTA in the upper 8 bits. In kernels without clusters these are 0.

/// The number of this CTA in its cluster.
FLASHPLAN_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
/// The address of the same place in the shared memory of CTA number `rank` of the cluster.
FLASHPLAN_DEVICE uint32_t address_in_cta(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
/// Arrives at an mbarrier of any CTA of the cluster, to say that this thread has finished reading.
/// The arrival is relaxed, because those who wait do not read what this thread has written.
FLASHPLAN_DEVICE void mbarrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(barrier)
               : "memory");
}
/// Starts the copy of `bytes` contiguous bytes from this CTA's shared memory to that of a CTA of
/// the cluster; they count for `barrier`, of that CTA. Addresses and the number of bytes are
/// multiples of 16. fence_async_proxy() must lie between ordinary writes to `from` and the copy.
FLASHPLAN_DEVICE void bulk_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];\n" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Waits until all threads of the cluster have come here. Then the mbarriers of all its CTAs are
/// initialised, and mbarrier_fence_init() has published them. All threads of the warp call it.
FLASHPLAN_DEVICE void cluster_barrier_of_begin() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}
/// Waits until all threads of the cluster have come here, and their earlier reads and writes are
/// complete. All threads of the warp call it.
FLASHPLAN_DEVICE void cluster_barrier() {
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

/// Starts the copy of `bytes` contiguous bytes to shared memory; they count for `barrier`. Both
/// addresses and the number of bytes are multiples of 16.
FLASHPLAN_DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Starts the copy of `bytes` contiguous bytes from shared to global memory. tma_store_commit()
/// ends a group of such copies; tma_store_wait_read() and bulk_store_wait() wait for all groups.
FLASHPLAN_DEVICE void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
/// Starts the copy of one box of a three-dimensional tensor map to shared memory; its bytes count
/// for `barrier`. Elements outside of the tensor arrive as zeros.
FLASHPLAN_DEVICE void tma_load_3d(uint32_t to, const void* tensor_map, uint32_t barrier, int c0,
                                  int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(to),
      "l"(tensor_map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
/// Starts the copy of one box of a five-dimensional tensor map to shared memory; its bytes count
/// for `barrier`. Elements outside of the tensor arrive as zeros.
FLASHPLAN_DEVICE void tma_load_5d(uint32_t to, const void* tensor_map, uint32_t barrier, int c0,
                                  int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];\n" ::"r"(to),
      "l"(tensor_map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
/// Starts to bring one box of a five-dimensional tensor map to the L2 cache.
FLASHPLAN_DEVICE void tma_prefetch_5d(const void* tensor_map, int c0, int c1, int c2, int c3,
                                      int c4) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];\n" ::"l"(tensor_map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
/// Starts the copy of a box from shared memory to a tensor. The thread that starts it also commits
/// it and waits for it, by the functions below.
FLASHPLAN_DEVICE void tma_store_3d(const void* tensor_map, uint32_t from, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n" ::"l"(
          tensor_map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
FLASHPLAN_DEVICE void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
/// Waits until the committed TMA and bulk stores of this thread have read their data from shared
/// memory, which may be overwritten from then on.
FLASHPLAN_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}
/// Waits until the committed TMA and bulk stores of this thread have written their data to global
/// memory.
FLASHPLAN_DEVICE void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}
FLASHPLAN_DEVICE void tma_prefetch_map(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(tensor_map) : "memory");
}

/// Orders this thread's ordinary writes to shared memory before later accesses by the tensor cores
/// and by bulk copies, which pass through another proxy.
FLASHPLAN_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

/// Orders ordinary writes to shared and global memory before later accesses through the async
/// proxy. These are this thread's own writes, and writes of other threads that happened before, for
/// example before a barrier that both threads have passed.
FLASHPLAN_DEVICE void fence_async_proxy_of_all_memory() {
  asm volatile("fence.proxy.async;\n" ::: "memory");
}

/// release_registers() reduces the registers of this warpgroup's threads to kRegisters, and
/// take_registers() raises them.
template <int kRegisters>
FLASHPLAN_DEVICE void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
FLASHPLAN_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

/// If `does` is true, waits at the named barrier `id` until `threads` threads have come to it; the
/// second function arrives without waiting. `does` must be the same in all threads of the warp.
/// Each is one predicated instruction, because before a branch the compiler would wait for all
/// products in flight.
FLASHPLAN_DEVICE void barrier_wait_if(bool does, int id, int threads) {
  asm volatile(
      "{\n.reg .pred does;\nsetp.ne.b32 does, %2, 0;\n@does bar.sync %0, %1;\n}\n" ::"r"(id),
      "r"(threads), "r"(static_cast<int>(does))
      : "memory");
}
FLASHPLAN_DEVICE void barrier_arrive_if(bool does, int id, int threads) {
  asm volatile(
      "{\n.reg .pred does;\nsetp.ne.b32 does, %2, 0;\n@does bar.arrive %0, %1;\n}\n" ::"r"(id),
      "r"(threads), "r"(static_cast<int>(does))
      : "memory");
}

/// Stores four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix
/// i / 8.
FLASHPLAN_DEVICE void stmatrix(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace flashplan::device
