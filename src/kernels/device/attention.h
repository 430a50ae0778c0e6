// SPDX-License-Identifier: Apache-2.0
// The attention kernel of the sm80 family: persistent CTAs walk work queues, and split keys are
// merged in the same launch by the last CTA to finish.
#pragma once

#include "kernels/device/tile_runner.h"

namespace flashplan::device {

/// CTA c runs queue c of the schedule.
template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    attention_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  // Records of this tile and the next: they are there by the time they are needed.
  __shared__ QueueStart queue;
  TileContext& context = *reinterpret_cast<TileContext*>(smem);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < static_cast<int>(sizeof(QueueStart) / 16)) {
    reinterpret_cast<uint4*>(&queue)[thread] =
        reinterpret_cast<const uint4*>(p.starts + blockIdx.x)[thread];
  }
  __syncthreads();
  const int32_t begin = queue.begin;
  const int32_t end = queue.end;
  for (int32_t i = begin; i < end; ++i) {
    const int slot = (i - begin) % 2;
    if (thread == 0) context.assign(p, queue.tiles[slot], queue.requests[slot]);
    __syncthreads();
    if (thread < 2 && i + 2 < end) {
      cp_async_16(shared_address(&queue.tiles[slot]) + thread * 16,
                  reinterpret_cast<const unsigned char*>(p.tiles + i + 2) + thread * 16, true);
    }
    if (thread == 2 && i > begin && i + 1 < end) {
      cp_async_16(shared_address(&queue.requests[1 - slot]),
                  p.requests + queue.tiles[1 - slot].request, true);
    }
    const int num_rows = context.rows.num_rows;
    if (num_rows <= Shapes<T>::Few::kRows) {
      TileRunner<T, typename Shapes<T>::Few>(p, smem).run();
    } else if (num_rows <= Shapes<T>::Some::kRows) {
      TileRunner<T, typename Shapes<T>::Some>(p, smem).run();
    } else {
      TileRunner<T, typename Shapes<T>::Many>(p, smem).run();
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // shared memory is free for the next tile, and its records are there
  }
}

}  // namespace flashplan::device
