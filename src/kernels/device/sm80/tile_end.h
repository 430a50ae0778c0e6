// SPDX-License-Identifier: Apache-2.0
// The end of a work tile in the sm80 family: the CTA arrives at merges, and merges where it is the
// last to arrive.
#pragma once

#include "kernels/device/sm80/merge_partials.h"
#include "kernels/device/sm80/tile_context.h"

namespace flashplan::device {

/// Arrives at `count` merges: `first`, `first` + step, ... All threads call finish(MergeNumbers)
/// for the merges at which this CTA was the last to arrive, up to kAtOnce merges at a time.
template <int kAtOnce, typename Finish>
FLASHPLAN_DEVICE void arrive_at(const AttentionParams& p, TileContext& context, int thread,
                                int32_t first, int32_t count, int32_t step, Finish finish) {
  __syncthreads();  // partial results are written, and is_last of earlier merges has been read
#pragma unroll 1
  for (int32_t begin = 0; begin < count; begin += 32) {
    if (thread < 32) {
      bool is_last = false;
      if (begin + thread < count) {
        const int32_t number = first + (begin + thread) * step;
        is_last = is_last_to_arrive(counter_of(p, number), p.schedule.merges[number].num_pieces);
      }
      const uint32_t all = __ballot_sync(0xffffffffU, is_last);
      if (thread == 0) context.is_last = all;
    }
    __syncthreads();
    uint32_t left = context.is_last;
#pragma unroll 1
    while (left != 0) {
      MergeNumbers<kAtOnce> merges;
#pragma unroll
      for (int32_t& number : merges.numbers) {
        number = left == 0 ? kNoMerge : first + (begin + __ffs(static_cast<int>(left)) - 1) * step;
        left &= left - 1;
      }
      finish(merges);
    }
    __syncthreads();
  }
}

/// Ends a work tile of a shared prefix, or of a request that reads one. It is not inlined, so that
/// the code of all other tiles lies close together.
template <typename T>
__device__ __noinline__ void finish_sharer(const AttentionParams& p, TileContext& context,
                                           int thread) {
  constexpr int kAtOnce = 4;  // heads of a request, or requests of a prefix, merged side by side
  const WorkTile& tile = context.tile;
  const auto merge_requests = [&](MergeNumbers<kAtOnce> merges) {
    merge_with_prefixes<T>(p, merges, thread);
  };
  if (context.merge.num_readers == 0) {
    for (int h = thread; h < tile.num_kv_heads; h += T::kThreads) {
      const int32_t number = tile.merge + h;
      wait_for_prefixes(p.schedule.merges[number], counter_of(p, number));
    }
    arrive_at<kAtOnce>(p, context, thread, tile.merge, tile.num_kv_heads, 1, merge_requests);
    return;
  }
  arrive_at<1>(p, context, thread, tile.merge, tile.num_kv_heads, 1, [&](MergeNumbers<1> of_head) {
    const Merge& merge = p.schedule.merges[of_head.numbers[0]];
    arrive_at<kAtOnce>(p, context, thread, merge.first_reader, merge.num_readers, merge.reader_step,
                       merge_requests);
  });
}

/// Merges rows with at least kManyStates states. Such merges mostly have few rows, so this function
/// loads 16 states of one row at a time. It is not inlined, so that a kernel has one copy of it.
constexpr int32_t kManyStates = 8;
template <typename T>
__device__ __noinline__ void merge_many_states(const AttentionParams& p, const Merge& merge,
                                               const MergePart& part) {
  merge_partials<T, 1, 16>(p, merge, part);
}

/// Arrives at the merge of a split head. Calls merge_rows(merge, part) for what this CTA then has
/// to merge. `kMayDivide`: whether CTAs may divide the rows of the merge.
template <typename T, bool kMayDivide, typename MergeRows>
FLASHPLAN_DEVICE void arrive_and_merge_with(const AttentionParams& p, TileContext& context,
                                            int thread, MergeRows merge_rows) {
  const Merge& merge = context.merge;
  if (T::Variant::kIsBuiltIn && (merge.parent >= 0 || merge.num_readers > 0)) {
    finish_sharer<T>(p, context, thread);
    return;
  }
  __syncthreads();  // this CTA's partial results are written
  if (thread == 0) {
    context.part =
        arrive_at_merge<kMayDivide>(counter_of(p, context.tile.merge), merge, context.is_final);
  }
  __syncthreads();
  if (context.part.count != 0) merge_rows(merge, kMayDivide ? context.part : kAllRows);
}

/// Arrives at the merge of a split head, and merges by merge_partials<kRowsAtOnce,
/// kStatesAtOnce>().
template <typename T, int kRowsAtOnce, int kStatesAtOnce, bool kMayDivide = true>
FLASHPLAN_DEVICE void arrive_and_merge(const AttentionParams& p, TileContext& context, int thread) {
  arrive_and_merge_with<T, kMayDivide>(p, context, thread, [&](const Merge& merge, MergePart part) {
    if (kStatesAtOnce < 4 && merge.num_states >= kManyStates) {
      merge_many_states<T>(p, merge, part);
    } else {
      merge_partials<T, kRowsAtOnce, kStatesAtOnce>(p, merge, part);
    }
  });
}

/// Whether FewRows takes the work tile of `context`.
template <typename T>
FLASHPLAN_DEVICE bool takes_few_rows(const AttentionParams& p, const TileContext& context) {
  return kPairedDims<T> > 0 && context.block.rows.num_rows <= kMostPairedRows &&
         p.tensors.head_dim_qk == kPairedDims<T> && p.tensors.head_dim_vo == kPairedDims<T> &&
         p.schedule.chunk_kv == 0 && !p.tensors.mask.is_given;
}

/// Arrives at the merge of a work tile that FewRows takes, and merges the rows of all its kv heads.
template <typename T>
FLASHPLAN_DEVICE void arrive_and_merge_few(const AttentionParams& p, TileContext& context,
                                           int thread) {
  arrive_and_merge_with<T, false>(p, context, thread, [&](const Merge& merge, MergePart) {
    merge_few_rows<T>(p, merge, context.tile.num_kv_heads);
  });
}

/// Does what arrive_and_merge() does, for any number of rows. It is not inlined, so that a kernel
/// has one copy of it.
template <typename T>
__device__ __noinline__ void arrive_and_merge_any(const AttentionParams& p, TileContext& context,
                                                  int thread) {
  arrive_and_merge<T, 1, 16>(p, context, thread);
}

/// Writes empty states if a work tile of a merge has written fewer states than were planned. This
/// happens if its request is shorter than planned, or if a plan with a window has one spare state
/// for each head and the tile did not need it. This is rare, so it is not inlined.
template <typename T>
__device__ __noinline__ void write_missing_states(const AttentionParams& p,
                                                  const TileContext& context, int thread) {
  const KeySpan keys = context.block.keys;
  const int32_t num_keys = max(keys.end - keys.begin, 0);
  const bool chunked = p.schedule.chunk_kv > 0;
  const int32_t planned = chunked ? num_chunk_states(context.tile, context.merge, p) : 1;
  const int32_t written =
      chunked ? (num_keys + p.schedule.chunk_kv - 1) / p.schedule.chunk_kv : num_keys > 0;
  // In a state, the rows of several heads lie one after the other.
  const int num_rows = context.block.rows.num_rows * context.tile.num_kv_heads;
  for (int32_t state = written; state < planned; ++state) {
    const int64_t first_row = int64_t{context.tile.partial_row} + state * T::kTileQ;
    for (int i = thread; i < num_rows * T::kHeadDimVo; i += T::kThreads) {
      p.workspace.partial_o[first_row * T::kHeadDimVo + i] = 0.0F;
    }
    for (int row = thread; row < num_rows; row += T::kThreads) {
      p.workspace.partial_lse[first_row + row] = -infinity();
    }
  }
}

/// Ends a work tile whose rows see no key. This is rare, so it is not inlined.
template <typename T>
__device__ __noinline__ void finish_without_keys(const AttentionParams& p, TileContext& context,
                                                 int thread) {
  if (context.tile.merge >= 0) {
    if (thread == 0) context.merge = p.schedule.merges[context.tile.merge];
    __syncthreads();
    write_missing_states<T>(p, context, thread);
    if constexpr (kPairedDims<T> > 0) {
      // The bits of results must not depend on which work tile arrives last, so the same function
      // must merge as in run_few_rows().
      if (takes_few_rows<T>(p, context)) {
        arrive_and_merge_few<T>(p, context, thread);
        return;
      }
    }
    if constexpr (T::Variant::kIsBuiltIn) {
      arrive_and_merge<T, 1, 4>(p, context, thread);
    } else {
      arrive_and_merge_any<T>(p, context, thread);
    }
    return;
  }
  constexpr int kQuads = T::kHeadDimVo / 4;
  const typename T::Variant variant(p);
  for (int h = 0; h < context.tile.num_kv_heads; ++h) {
    for (int i = thread; i < context.block.rows.num_rows * kQuads; i += T::kThreads) {
      write_result<T>(p, variant, context.block.rows, context.tile.kv_head + h, i / kQuads,
                      i % kQuads * 4, {0.0F, 0.0F, 0.0F, 0.0F}, 1.0F, -infinity());
    }
  }
}

}  // namespace flashplan::device
