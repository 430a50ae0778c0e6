// SPDX-License-Identifier: Apache-2.0
// The attention kernel of the sm90_mla family, for multi-head latent attention: a producer
// warpgroup brings queries and keys, whose first dims are the values; two consumer warpgroups
// compute.
#pragma once

#include "kernels/device/sm90/mla/consumer.h"
#include "kernels/device/sm90/mla/key_loader.h"
#include "kernels/device/sm90/mla/pair_loader.h"
#include "kernels/device/sm90/mla/record_loader.h"
#include "kernels/device/sm90/mla/row_loader.h"
#include "kernels/device/sm90/mla/staged_loader.h"
#include "kernels/device/sm90/mla/unaligned_loader.h"

namespace flashplan::device {

template <typename S>
FLASHPLAN_DEVICE void begin_mla_memory(const AttentionParams& p, const MlaSmem<S>& smem) {
  const bool gathers = !S::kHasValues && !p.maps.has_kv;
  const int loaders = S::kWidens ? S::kWideningWarps : gathers ? S::kGatherWarps : 1;
  const int writers = gathers && !S::kWidens ? MlaRowLoader<S, true>::kArrivals : loaders;
  for (uint32_t block = 0; block < S::kSlots; ++block) {
    for (int part = 0; part < 2; ++part) {
      mbarrier_init(smem.full(block, part).barrier, writers);
      mbarrier_init(smem.empty(block, part), 4 * S::kCtas);
      if constexpr (S::kHasValues) {
        mbarrier_init(smem.values_full(block, part).barrier, 1);
        mbarrier_init(smem.values_empty(block, part), 4);
      }
    }
  }
  mbarrier_init(smem.tail_full(), 1);
  mbarrier_init(smem.q_full(), 1);
  mbarrier_init(smem.q_empty(), S::kConsumerWarps);
  for (uint32_t i = 0; i < S::kContexts; ++i) {
    mbarrier_init(smem.context_full(i), 1);
    mbarrier_init(smem.context_empty(i), S::kConsumerWarps + loaders);
  }
  store_shared_4(smem.on_pages(), kAllOnPages);
  store_shared_4(smem.num_waiting(), 0);
  mbarrier_fence_init();
}

/// Runs warp `warp` of a producer that widens keys, or brings them by boxes.
template <typename S>
FLASHPLAN_DEVICE void run_mla_producer(const AttentionParams& p, const MlaSmem<S>& smem, int warp,
                                       uint32_t queue_word) {
  if constexpr (S::kWidens) {
    if (!p.tensors.vectorized) {
      widen_unaligned_rows(p, smem, warp, queue_word);
    } else if constexpr (S::kPairs) {
      MlaPairLoader<S>(p, smem, warp).run(queue_word);
    } else {
      MlaStagedLoader<S>(p, smem, warp).run(queue_word);
    }
  } else if (warp == S::kRecordWarp) {
    MlaRecordLoader<S>(p, smem).run(queue_word);
  } else if (warp == 0) {
    MlaBoxLoader<S>(p, smem).run(queue_word);
  }
}

/// Runs warp `warp` of a producer that copies keys row by row.
template <typename S>
FLASHPLAN_DEVICE void run_mla_row_producer(const AttentionParams& p, const MlaSmem<S>& smem,
                                           int warp, uint32_t queue_word) {
  const int number = warp > S::kRecordWarp ? warp - 1 : warp;
  if (warp == S::kRecordWarp) {
    MlaRecordLoader<S>(p, smem).run(queue_word);
  } else if (p.tensors.vectorized) {
    MlaRowLoader<S, true>(p, smem, number).run();
  } else {
    copy_unaligned_rows(p, smem, number);
  }
}

// The roles of warpgroups.
constexpr int kCopier = 0;  // a producer that copies keys row by row
constexpr int kConsumer = 1;
constexpr int kProducer = 2;

/// With cold caches, the first 64 KB of a kernel's code cause no cache misses. nvcc emits the last
/// branch of the if-else chain below first, if it does not know how the conditions depend on each
/// other. So the code has this order: the producer, both consumers, and then the producer that
/// copies keys row by row.
template <typename S>
FLASHPLAN_DEVICE void run_mla(const AttentionParams& p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const MlaSmem<S> shared(reinterpret_cast<MlaSharedMemory<S>&>(smem));
  // The queue is requested before anything else, so that it arrives while code is fetched from
  // memory.
  const uint32_t queue_word = MlaRecordLoader<S>::request_queue(p);
  if (threadIdx.x == 32) {
    tma_prefetch_map(&p.maps.q);
    tma_prefetch_map(&p.maps.q_tail);
    tma_prefetch_map(&p.maps.k);
    tma_prefetch_map(&p.maps.k_tail);
  }
  if (threadIdx.x == 0) begin_mla_memory(p, shared);
  wait_for_last_kernel();
  allow_next_kernel();
  __syncthreads();
  if (S::kPairs) cluster_barrier_of_begin();
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32 % 4, 0);
  const bool copies_rows = !S::kWidens && !p.maps.has_kv;
  const int role = opaque(warpgroup < S::kWarpgroups ? kConsumer
                          : copies_rows              ? kCopier
                                                     : kProducer);
  if (!S::kWidens && role == kCopier) {
    release_registers<S::kProducerRegisters>();
    run_mla_row_producer(p, shared, warp, queue_word);
  } else if (role == kConsumer) {
    take_registers<S::kConsumerRegisters>();
    MlaConsumer<S>(p, shared, warpgroup).run();
  } else {
    release_registers<S::kProducerRegisters>();
    run_mla_producer(p, shared, warp, queue_word);
  }
  if (S::kPairs) cluster_barrier();  // until then the other CTA arrives at mbarriers of this one
}

template <typename Choices>
__global__ void __launch_bounds__(MlaShape<Choices>::kThreads, 1)
    sm90_mla_kernel(const __grid_constant__ AttentionParams p) {
  run_mla<MlaShape<Choices>>(p);
}

/// Two CTAs, a cluster, compute the work tiles of a queue together; see MlaShape.
template <typename Choices>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(MlaShape<Choices, true>::kThreads, 1)
    sm90_mla_pairs_kernel(const __grid_constant__ AttentionParams p) {
  run_mla<MlaShape<Choices, true>>(p);
}

}  // namespace flashplan::device
