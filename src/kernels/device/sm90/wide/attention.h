// SPDX-License-Identifier: Apache-2.0
// The attention kernel of the sm90_wide family, for keys and values of more than 256 dims: the
// consumers of the sm90_mla family, with a producer that brings values, too.
#pragma once

#include "kernels/device/sm90/mla/attention.h"
#include "kernels/device/sm90/wide/kv_loader.h"
#include "kernels/device/sm90/wide/record_loader.h"
#include "kernels/device/sm90/wide/shape.h"

namespace flashplan::device {

/// The producer is the last branch, because nvcc emits the last branch of an if-else chain first:
/// its code is then among the first 64 KB, which cause no instruction-cache misses.
template <typename Choices>
__global__ void __launch_bounds__(WideShape<Choices>::kThreads, 1)
    sm90_wide_kernel(const __grid_constant__ AttentionParams p) {
  using S = WideShape<Choices>;
  extern __shared__ __align__(1024) unsigned char smem[];
  const MlaSmem<S> shared(reinterpret_cast<MlaSharedMemory<S>&>(smem));
  // The queue is requested before anything else, so that it arrives while code is fetched from
  // memory.
  const uint32_t queue_word = MlaRecordLoader<S>::request_queue(p);
  if (threadIdx.x == 32) {
    tma_prefetch_map(&p.maps.q);
    tma_prefetch_map(&p.maps.k);
    tma_prefetch_map(&p.maps.v);
  }
  if (threadIdx.x == 0) begin_mla_memory(p, shared);
  wait_for_last_kernel();
  allow_next_kernel();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup < S::kWarpgroups) {
    take_registers<S::kConsumerRegisters>();
    MlaConsumer<S>(p, shared, warpgroup).run();
  } else {
    release_registers<S::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32 % 4, 0);
    if (warp == S::kRecordWarp) {
      WideRecordLoader<S>(p, shared).run(queue_word);
    } else if (warp == 0) {
      WideKvLoader<S>(p, shared).run();
    }
  }
}

}  // namespace flashplan::device
