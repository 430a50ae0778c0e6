// SPDX-License-Identifier: Apache-2.0
// The attention kernel of the sm90_fp8 family: queries, keys and values of float8_e4m3fn,
// multiplied as they are. It is that of the sm90 family but for its consumers and a warpgroup that
// transposes values.
#pragma once

#include "kernels/device/sm90/fp8/consumer.h"
#include "kernels/device/sm90/fp8/transposer.h"
#include "kernels/device/sm90/producer.h"
#include "kernels/device/sm90/reader_merges.h"

namespace flashplan::device {

template <typename Choices>
__global__ void __launch_bounds__(Sm90Fp8Shape<Choices>::kThreads, 1)
    sm90_fp8_attention_kernel(const __grid_constant__ AttentionParams p) {
  using S = Sm90Fp8Shape<Choices>;
  extern __shared__ __align__(1024) unsigned char smem[];
  const Sm90Smem<S> memory(reinterpret_cast<Sm90SharedMemory<S>&>(smem));
  const uint32_t queue_word = Sm90QueryLoader<S>::request_queue(p);
  if (threadIdx.x == 32) {
    tma_prefetch_map(&p.maps.q_tokens);
    tma_prefetch_map(&p.maps.k);
    tma_prefetch_map(&p.maps.v);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kSlots; ++i) {
      mbarrier_init(memory.slot_full(i), 1);
      mbarrier_init(memory.slot_empty(i), S::kConsumerWarps);
      mbarrier_init(memory.key_loaded(i), 1);  // says that values can be transposed
    }
    for (int i = 0; i < S::kQBarriers; ++i) {
      mbarrier_init(memory.q_loaded(i), 2);
      mbarrier_init(memory.q_empty(i), S::kConsumerWarps);
    }
    for (int i = 0; i < S::kContexts; ++i) {
      mbarrier_init(memory.context_full(i), 1);
      mbarrier_init(memory.context_empty(i), S::kConsumerWarps + 2 + S::kKvReaders);
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(memory.tail_full(i), 1);
    store_shared_4(memory.on_pages(), kAllOnPages);
    Sm90Merge<S>::begin(memory);
    mbarrier_fence_init();
    Sm90ReaderMerges<S>(p, memory).begin();
  }
  wait_for_last_kernel();
  allow_next_kernel();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup < S::kWarpgroups) {
    take_registers<S::kConsumerRegisters>();
    Sm90Fp8Consumer<S>(p, memory, warpgroup).run();
    Sm90ReaderMerges<S>(p, memory).merge_all();
  } else if (warpgroup == S::kWarpgroups) {
    release_registers<S::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32 % 4, 0);
    run_sm90_producer<S>(p, memory, warp, queue_word);
  } else {
    release_registers<S::kTransposerRegisters>();
    Sm90Transposer<S>(memory).run();
  }
}

}  // namespace flashplan::device
