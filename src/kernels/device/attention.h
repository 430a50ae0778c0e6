// SPDX-License-Identifier: Apache-2.0
// The attention kernel of the sm80 family: persistent CTAs walk work queues, and split keys are
// merged in the same launch by the last CTA to finish.
#pragma once

#include "kernels/device/tile_runner.h"

namespace flashplan::device {

/// Reads all of the parameters once, while there is something else to wait for: they come from
/// memory, a line at a time when first used. To `scratch` in shared memory, for a load that nobody
/// uses is no load.
FLASHPLAN_DEVICE void touch(const AttentionParams& p, int thread, uint32_t scratch) {
  constexpr int kWords = 16;     // of a line
  const int line = thread - 32;  // the first warp has the queue to ask for
  if (line >= 0 && line * kWords < static_cast<int>(sizeof(AttentionParams)) / 4) {
    store_shared_4(scratch + line * 4, reinterpret_cast<const uint32_t*>(&p)[line * kWords]);
  }
}

template <typename T, typename S>
FLASHPLAN_DEVICE void run_tile(const AttentionParams& p, TileContext& context,
                               unsigned char* smem) {
  TileRunner<T, S>(p, context, smem).run();
}

/// CTA c runs queue c of the schedule. What comes first in the code of a kernel runs 5 to 10 us
/// sooner where caches are cold: `kFewFirst` says that this be decode. Compilers begin with what
/// comes last in a chain of branches.
template <typename Choices, bool kFewFirst = false>
__global__ void __launch_bounds__(Tiling<Choices, kCompiledSmemPerSm>::kThreads,
                                  Tiling<Choices, kCompiledSmemPerSm>::kCtasPerSm)
    attention_kernel(const __grid_constant__ AttentionParams p) {
  using T = Tiling<Choices, kCompiledSmemPerSm>;
  extern __shared__ __align__(128) unsigned char smem[];
  // Records of this tile and the next: they are there by the time they are needed.
  __shared__ QueueStart queue;
  __shared__ TileContext contexts[2];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < static_cast<int>(sizeof(QueueStart) / 16)) {
    cp_async_16(
        shared_address(&queue) + thread * 16,
        reinterpret_cast<const unsigned char*>(p.schedule.starts + blockIdx.x) + thread * 16);
  }
  touch(p, thread, shared_address(smem));
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const int32_t begin = queue.begin;
  const int32_t end = queue.end;
  if (begin >= end) return;
  if (thread == 0) contexts[0].assign(p, queue.tiles[0], queue.segments[0]);
  __syncthreads();
  for (int32_t i = begin; i < end; ++i) {
    const int slot = (i - begin) % 2;
    TileContext& context = contexts[slot];
    if (thread == 0) {
      if (i + 2 < end) {
        const auto* tile = reinterpret_cast<const unsigned char*>(p.schedule.tiles + i + 2);
        cp_async_16(shared_address(&queue.tiles[slot]), tile);
        cp_async_16(shared_address(&queue.tiles[slot]) + 16, tile + 16);
      }
      if (i > begin && i + 1 < end) {
        cp_async_16(shared_address(&queue.segments[1 - slot]),
                    p.schedule.segments + queue.tiles[1 - slot].segment);
      }
    }
    const int num_rows = context.block.rows.num_rows;
    using S = Shapes<T>;
    if constexpr (kFewFirst) {
      if (num_rows > S::Some::kRows) {
        run_tile<T, typename S::Many>(p, context, smem);
      } else if (num_rows > S::Few::kRows) {
        run_tile<T, typename S::Some>(p, context, smem);
      } else {
        run_tile<T, typename S::Few>(p, context, smem);
      }
    } else {
      if (num_rows <= S::Few::kRows) {
        run_tile<T, typename S::Few>(p, context, smem);
      } else if (num_rows <= S::Some::kRows) {
        run_tile<T, typename S::Some>(p, context, smem);
      } else {
        run_tile<T, typename S::Many>(p, context, smem);
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    if (thread == 0 && i + 1 < end) {
      contexts[1 - slot].assign(p, queue.tiles[1 - slot], queue.segments[1 - slot]);
    }
    __syncthreads();  // shared memory is free for the next tile, whose context is there
  }
}

}  // namespace flashplan::device
