// SPDX-License-Identifier: Apache-2.0
// The attention kernel of the sm80 family. Persistent CTAs walk work queues. Where keys are split
// among CTAs, these CTAs also merge the states, in the same launch.
#pragma once

#include "kernels/device/sm80/few_rows.h"
#include "kernels/device/sm80/mainloop.h"

namespace flashplan::device {

/// Reads every cache line of the parameters once, while the CTA waits for its queue. Otherwise each
/// line would be fetched from memory only at the first use of one of its fields. The values are
/// stored to `scratch` in shared memory, so that the compiler does not remove the loads.
FLASHPLAN_DEVICE void prefetch_params(const AttentionParams& p, int thread, uint32_t scratch) {
  constexpr int kWords = 16;     // 32-bit words of a 64-byte line
  const int line = thread - 32;  // warp 0 loads the queue instead
  // The fields after the workspace are read only by runs with a variant, keys in two tensors or
  // 8-bit queries.
  constexpr int kBytes = sizeof(ScheduleParams) + sizeof(TensorParams) + sizeof(Mask) +
                         sizeof(VariantParams) + sizeof(WorkspaceParams);
  if (line >= 0 && line * kWords < kBytes / 4) {
    store_shared_4(scratch + line * 4, reinterpret_cast<const uint32_t*>(&p)[line * kWords]);
  }
}

template <typename T, typename S>
FLASHPLAN_DEVICE void run_tile(const AttentionParams& p, TileContext& context,
                               unsigned char* smem) {
  Mainloop<T, S>(p, context, smem).run();
}

/// Does not inline run_tile(), so that the code of FewRows lies in the first 64 KB of the kernel.
template <typename T, typename S>
__device__ __noinline__ void call_run_tile(const AttentionParams& p, TileContext& context,
                                           unsigned char* smem) {
  run_tile<T, S>(p, context, smem);
}

/// Runs a work tile of up to 16 rows: by FewRows if that is compiled and takes the tile, else by
/// Mainloop.
template <typename T, typename S>
FLASHPLAN_DEVICE void run_tile_of_few(const AttentionParams& p, TileContext& context,
                                      unsigned char* smem) {
  if constexpr (kPairedDims<T> == 0) {
    run_tile<T, S>(p, context, smem);
  } else {
    if (!takes_few_rows<T>(p, context)) {
      call_run_tile<T, S>(p, context, smem);
    } else {
      run_few_rows<T>(p, context, smem);
    }
  }
}

/// Runs a work tile with the body that is compiled for its number of rows. nvcc places the code of
/// the last branch of an if-else chain first, so with `kFewFirst` the branch for few rows (decode)
/// is the last one.
template <typename T, bool kFewFirst>
FLASHPLAN_DEVICE void run_tile_by_rows(const AttentionParams& p, TileContext& context,
                                       unsigned char* smem) {
  using S = Shapes<T>;
  const int num_rows = context.block.rows.num_rows;
  if constexpr (T::kFewRowsAlone) {
    run_tile<T, typename S::Few>(p, context, smem);
  } else if constexpr (kFewFirst) {
    if (num_rows > S::kSomeRows) {
      run_tile<T, typename S::Many>(p, context, smem);
    } else if (S::kHasSome && num_rows > S::Few::kRows) {
      run_tile<T, typename S::Some>(p, context, smem);
    } else {
      run_tile_of_few<T, typename S::Few>(p, context, smem);
    }
  } else {
    if (num_rows <= S::Few::kRows) {
      run_tile_of_few<T, typename S::Few>(p, context, smem);
    } else if (S::kHasSome && num_rows <= S::kSomeRows) {
      run_tile<T, typename S::Some>(p, context, smem);
    } else {
      run_tile<T, typename S::Many>(p, context, smem);
    }
  }
}

/// Each CTA calls this when its queue has ended. If a kernel runs at the same time as the previous
/// kernel of the stream, it must not end earlier than that kernel, because later work on the stream
/// may wait for this kernel alone. So CTA 0 waits.
FLASHPLAN_DEVICE void end_beside_last(const AttentionParams& p) {
  if (p.schedule.beside_last && blockIdx.x == 0) wait_for_last_kernel();
}

/// CTA c runs queue c of the schedule. The first 64 KB of a kernel's code (4,096 instructions)
/// cause no instruction-cache misses even with cold caches. Code behind them is fetched from
/// memory, at 13 clocks per instruction, so `kFewFirst` decides which body comes first.
template <typename Choices, bool kFewFirst = false>
__global__ void __launch_bounds__(Tiling<Choices, kCompiledSmemPerSm>::kThreads,
                                  Tiling<Choices, kCompiledSmemPerSm>::kCtasPerSm)
    attention_kernel(const __grid_constant__ AttentionParams p) {
  using T = Tiling<Choices, kCompiledSmemPerSm>;
  extern __shared__ __align__(128) unsigned char smem[];
  // The first records of the queue, and the contexts of the current tile and of the next one. Later
  // records of the queue are loaded ahead, in place of records that are no longer needed.
  __shared__ QueueStart queue;
  __shared__ TileContext contexts[2];
  static_assert(sizeof(queue) + sizeof(contexts) <= T::kStaticSmemBytes);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < static_cast<int>(sizeof(QueueStart) / 16)) {
    cp_async_16(
        shared_address(&queue) + thread * 16,
        reinterpret_cast<const unsigned char*>(p.schedule.starts + blockIdx.x) + thread * 16);
  }
  prefetch_params(p, thread, shared_address(smem));
  cp_async_commit();
  cp_async_wait<0>();
  if (!p.schedule.beside_last) wait_for_last_kernel();
  __syncthreads();
  const int32_t begin = queue.begin;
  const int32_t end = queue.end;
  allow_next_kernel();
  if (begin >= end) {
    end_beside_last(p);
    return;
  }
  if (thread == 0) {
    contexts[0].assign(p, T::kTileKv, queue.tiles[0], queue.segments[0], begin + 1 == end);
  }
  __syncthreads();
  for (int32_t i = begin; i < end; ++i) {
    const int now = (i - begin) % 2;
    TileContext& context = contexts[now];
    if (thread == 0) {
      if (i + 2 < end) {
        const auto* tile = reinterpret_cast<const unsigned char*>(p.schedule.tiles + i + 2);
        cp_async_16(shared_address(&queue.tiles[now]), tile);
        cp_async_16(shared_address(&queue.tiles[now]) + 16, tile + 16);
      }
      if (i > begin && i + 1 < end) {
        cp_async_16(shared_address(&queue.segments[1 - now]),
                    p.schedule.segments + queue.tiles[1 - now].segment);
      }
    }
    run_tile_by_rows<T, kFewFirst>(p, context, smem);
    cp_async_commit();
    cp_async_wait<0>();
    if (thread == 0 && i + 1 < end) {
      contexts[1 - now].assign(p, T::kTileKv, queue.tiles[1 - now], queue.segments[1 - now],
                               i + 2 == end);
    }
    __syncthreads();  // the next tile's context is stored, and other shared memory is free
  }
  end_beside_last(p);
}

}  // namespace flashplan::device
