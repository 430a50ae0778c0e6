// SPDX-License-Identifier: Apache-2.0
// The attention kernel of the sm90 family: one producer warpgroup loads queries, keys and values
// into shared memory, two or three consumer warpgroups compute. Some kernels have one more
// warpgroup: it rotates queries and keys after they are loaded, or helps the producer to copy rows
// of pages that are too small for boxes of tensor maps, or widens 8-bit keys and values. Keys and
// values that many work tiles read may be prepared: some warps write them to the workspace once, in
// the form that the products need, and all of these tiles load them from there.
#pragma once

#include "kernels/device/sm90/consumer.h"
#include "kernels/device/sm90/gatherer.h"
#include "kernels/device/sm90/preparer.h"
#include "kernels/device/sm90/producer.h"
#include "kernels/device/sm90/rotator.h"
#include "kernels/device/sm90/widener.h"

namespace flashplan::device {

/// Runs gathering warp number `warp`. If keys and values are prepared, the first warps prepare
/// them, and the last two copy prepared tiles to shared memory.
template <typename S>
FLASHPLAN_DEVICE void run_sm90_gatherer(const AttentionParams& p, const Sm90Smem<S>& smem,
                                        int warp) {
  constexpr int kArrivals = S::kSlotArrivals;
  static_assert(S::kGatherWarps == S::kPreparingWarps + 2);
  if (!Sm90Prepared<S>::is_in_use(p, smem)) {
    Sm90Gatherer<S>(p, smem, warp).run();
    return;
  }
  if (warp < S::kPreparingWarps) {
    Sm90Preparer<S>(p, smem, warp).run();
  } else if (warp == S::kPreparingWarps) {
    Sm90PreparedLoader<S, true>(p, smem, warp).run(kArrivals);
  } else {
    Sm90PreparedLoader<S, false>(p, smem, warp).run(kArrivals);
  }
  Sm90Prepared<S>::leave(p);
}

/// With cold caches, the first 64 KB of the kernel's code (4,096 instructions) cause no
/// instruction-cache misses; code behind them is fetched from memory, at 13 clocks per instruction.
/// So what runs first has to lie first. nvcc emits the last branch of an if-else chain first: here
/// the producer, then the consumers' products and softmax, and merges at the end.
template <typename Choices>
__global__ void __launch_bounds__(Sm90Shape<Choices>::kThreads, 1)
    sm90_attention_kernel(const __grid_constant__ AttentionParams p) {
  using S = Sm90Shape<Choices>;
  extern __shared__ __align__(1024) unsigned char smem[];
  const Sm90Smem<S> shared(reinterpret_cast<Sm90SharedMemory<S>&>(smem));
  // The queue is requested before anything else, so that it arrives while code is fetched from
  // memory.
  const uint32_t queue_word = Sm90QueryLoader<S>::request_queue(p);
  if (threadIdx.x == 32) {
    tma_prefetch_map(&p.maps.q_tokens);
    tma_prefetch_map(&p.maps.k);
    tma_prefetch_map(&p.maps.v);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kSlots; ++i) {
      mbarrier_init(shared.slot_full(i), S::kSlotArrivals);
      mbarrier_init(shared.slot_empty(i), S::kConsumerWarps);
      if (S::kRotates) mbarrier_init(shared.key_loaded(i), 1);
    }
    for (int i = 0; i < S::kQBarriers; ++i) {
      mbarrier_init(shared.q_loaded(i), 2);
      if (S::kRotates) mbarrier_init(shared.q_full(i), 1);
      mbarrier_init(shared.q_empty(i), S::kConsumerWarps);
    }
    for (int i = 0; i < S::kContexts; ++i) {
      mbarrier_init(shared.context_full(i), 1);
      mbarrier_init(shared.context_empty(i),
                    S::kConsumerWarps + 2 + S::kKvReaders + (S::kRotates ? 4 : 0));
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(shared.tail_full(i), 1);
    store_shared_4(shared.on_pages(), kAllOnPages);
    if (S::kWidens) store_shared_4(shared.free_position(), 0);
    Sm90Merge<S>::begin(shared);
    mbarrier_fence_init();
    Sm90ReaderMerges<S>(p, shared).begin();
  }
  wait_for_last_kernel();
  allow_next_kernel();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup < S::kWarpgroups) {
    take_registers<S::kConsumerRegisters>();
    Sm90Consumer<S>(p, shared, warpgroup).run();
    if constexpr (S::Variant::kIsBuiltIn) Sm90ReaderMerges<S>(p, shared).merge_all();
  } else if constexpr (S::kGathers) {
    release_registers<S::kProducerRegisters>();
    // Warps 2 and 3 of the producer load queries. The other warps of both warpgroups gather.
    const int warp =
        __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0) - 4 * S::kWarpgroups;
    if (warp == 2 || warp == 3) {
      Sm90QueryLoader<S>(p, shared, warp).run(queue_word);
    } else {
      run_sm90_gatherer<S>(p, shared, warp < 2 ? warp : warp - 2);
    }
  } else if (S::kRotates && warpgroup > S::kWarpgroups) {
    if constexpr (S::kRotates) {
      release_registers<S::kRotatorRegisters>();
      Sm90Rotator<S> rotator(p, shared);
      bool is_prepared = false;
      if constexpr (S::kTakesPrepared) {
        is_prepared = Sm90Prepared<S>::is_in_use(p, shared);
        if (is_prepared) rotator.run_prepared();
      }
      if (!is_prepared) rotator.run();
    }
  } else if (S::kWidens && warpgroup > S::kWarpgroups) {
    if constexpr (S::kWidens) {
      release_registers<S::kWidenerRegisters>();
      const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32 % 4, 0);
      Sm90Widener<S>(p, shared, warp).run();
      Sm90Prepared<S>::leave_if_used(p);
    }
  } else {
    release_registers<S::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32 % 4, 0);
    run_sm90_producer<S>(p, shared, warp, queue_word);
  }
}

}  // namespace flashplan::device
