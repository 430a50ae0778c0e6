// SPDX-License-Identifier: Apache-2.0
// Merges partial results by all threads of a CTA.
#pragma once

#include "kernels/device/merge_part.h"
#include "kernels/device/write_result.h"

namespace flashplan::device {

/// The factors of a merge for variants without softmax: states are added without weights.
constexpr float2 kSum = {1.0F, 1.0F};

/// Merges the states of the rows `part` of a merge in the order of their keys, and writes o and
/// lse. To hide the latency of memory, a thread loads 4 dims of kStatesAtOnce states of kRowsAtOnce
/// rows before it uses any of them.
template <typename T, int kRowsAtOnce, int kStatesAtOnce>
FLASHPLAN_DEVICE void merge_partials(const AttentionParams& p, const Merge& merge,
                                     const MergePart& part) {
  constexpr int kQuads = T::kHeadDimVo / 4;
  constexpr int kStateFloats = T::kTileQ * T::kHeadDimVo;
  const typename T::Variant variant(p);
  const int num_quads = part.end(merge.rows.num_rows) * kQuads;
  const int first_quad = part.begin(merge.rows.num_rows) * kQuads;
  for (int begin = first_quad + static_cast<int>(threadIdx.x); begin < num_quads;
       begin += kRowsAtOnce * T::kThreads) {
    MergedRow merged[kRowsAtOnce];
    float4 o[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      merged[r].reset();
      o[r] = {0.0F, 0.0F, 0.0F, 0.0F};
    }
    const float* from_o[kRowsAtOnce];
    const float* from_lse[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const int quad = min(begin + r * T::kThreads, num_quads - 1);
      const int64_t row = int64_t{merge.first_partial_row} + quad / kQuads;
      from_o[r] = p.workspace.partial_o + row * T::kHeadDimVo + quad % kQuads * 4;
      from_lse[r] = p.workspace.partial_lse + row;
    }
#pragma unroll 1
    for (int left = merge.num_states; left > 0; left -= kStatesAtOnce) {
      float4 added[kRowsAtOnce][kStatesAtOnce];
      float lse[kRowsAtOnce][kStatesAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
          added[r][i] = load_4_if(i < left, from_o[r] + i * kStateFloats, 0.0F);
          lse[r][i] = load_if(i < left, from_lse[r] + i * T::kTileQ, -infinity());
        }
        from_o[r] += kStatesAtOnce * kStateFloats;
        from_lse[r] += kStatesAtOnce * T::kTileQ;
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
          o[r] = merge_values(o[r], added[r][i],
                              T::Variant::kUseSoftmax ? merged[r].add(lse[r][i]) : kSum);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const int quad = begin + r * T::kThreads;
      if (quad < num_quads) {
        const float scale = T::Variant::kUseSoftmax ? merged[r].inverse() : 1.0F;
        write_result<T>(p, variant, merge.rows, merge.kv_head, quad / kQuads, quad % kQuads * 4,
                        o[r], scale, merged[r].lse());
      }
    }
  }
}

/// Merges the states of few rows of each of `num_heads` kv heads; the partial rows of a head follow
/// those of the head before it. A warp merges one row at a time, and each lane four of its dims.
/// The weights of 32 states are computed at once, one by each lane.
template <typename T>
FLASHPLAN_DEVICE void merge_few_rows(const AttentionParams& p, const Merge& merge,
                                     int32_t num_heads) {
  constexpr int kStatesAtOnce = 16;
  constexpr int kStateFloats = T::kTileQ * T::kHeadDimVo;
  static_assert(T::kHeadDimVo <= 128);
  const typename T::Variant variant(p);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int dim = lane * 4 % T::kHeadDimVo;  // lanes past the last dim repeat other dims
  const int32_t num_rows = merge.rows.num_rows;
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x) / 32; r < num_rows * num_heads;
       r += T::kThreads / 32) {
    const int64_t partial_row = int64_t{merge.first_partial_row} + r;
    const float* from_o = p.workspace.partial_o + partial_row * T::kHeadDimVo + dim;
    const float* from_lse = p.workspace.partial_lse + partial_row + lane * T::kTileQ;
    MergedRow merged;
    merged.reset();
    float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
    float lse = load_if(lane < merge.num_states, from_lse, -infinity());
    float weight = 0.0F;
#pragma unroll 1
    for (int first = 0; first < merge.num_states; first += kStatesAtOnce) {
      float4 added[kStatesAtOnce];
#pragma unroll
      for (int i = 0; i < kStatesAtOnce; ++i) {
        added[i] = load_4_if(first + i < merge.num_states, from_o + i * kStateFloats, 0.0F);
      }
      from_o += kStatesAtOnce * kStateFloats;
      if (first % 32 == 0) {
        const float shrink = merged.add_of_lanes(lse, &weight);
        o = scaled(o, shrink);
        from_lse += 32 * T::kTileQ;
        lse = load_if(first + 32 + lane < merge.num_states, from_lse, -infinity());
      }
#pragma unroll
      for (int i = 0; i < kStatesAtOnce; ++i) {
        const float w = __shfl_sync(0xffffffffU, weight, first % 32 + i);
        o = merge_values(o, added[i], {1.0F, w});
      }
    }
    if (lane * 4 < T::kHeadDimVo) {
      const int head = num_heads > 1 ? r / num_rows : 0;
      write_result<T>(p, variant, merge.rows, merge.kv_head + head, r - head * num_rows, dim, o,
                      merged.inverse(), merged.lse());
    }
  }
}

/// The numbers of up to kCount merges; entries behind the last one are kNoMerge.
constexpr int32_t kNoMerge = -1;
template <int kCount>
struct MergeNumbers {
  int32_t numbers[kCount];
};

/// For each merge whose number is given: merges the partial results of a request's rows in the
/// order of their keys, then those of the prefixes that the request reads, from the innermost
/// outwards. Writes o and lse. The result does not depend on which CTA does this. A CTA that ends a
/// prefix may have to merge all requests that read it, so several requests are merged side by side,
/// with more loads in flight.
template <typename T, int kCount>
__device__ __noinline__ void merge_with_prefixes(const AttentionParams& p,
                                                 MergeNumbers<kCount> merges, int thread) {
  constexpr int kQuads = T::kHeadDimVo / 4;
  constexpr int kStatesAtOnce = 8;
  const typename T::Variant variant(p);
  const auto merge_of = [&](int r) -> const Merge& {
    const int32_t number = merges.numbers[r];
    return p.schedule.merges[number == kNoMerge ? merges.numbers[0] : number];
  };
  int num_quads[kCount];
  int most_quads = 0;
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    num_quads[r] = merges.numbers[r] == kNoMerge ? 0 : merge_of(r).rows.num_rows * kQuads;
    most_quads = max(most_quads, num_quads[r]);
  }
#pragma unroll 1
  for (int quad = thread; quad < most_quads; quad += T::kThreads) {
    const int row = quad / kQuads;
    const int dim = quad % kQuads * 4;
    MergedRow merged[kCount];
    float4 o[kCount];
    int64_t at[kCount];      // the next state's partial row
    int32_t left[kCount];    // states of the current merge that are not added yet
    int32_t parent[kCount];  // the merge of the next prefix
    const auto begin = [&](int r, const Merge& from) {
      left[r] = from.num_states;
      parent[r] = from.parent;
      at[r] = int64_t{from.first_partial_row} +
              merge_of(r).rows.row_in(from.rows, p.schedule.group_size) + row;
    };
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      merged[r].reset();
      o[r] = {0.0F, 0.0F, 0.0F, 0.0F};
      begin(r, merge_of(r));
      if (quad >= num_quads[r]) {
        left[r] = 0;
        parent[r] = kNoMerge;
      }
    }
    bool has_more;
#pragma unroll 1
    do {
      float4 added[kCount][kStatesAtOnce];
      float lse[kCount][kStatesAtOnce];
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
          const int64_t state = at[r] + i * T::kTileQ;
          added[r][i] =
              load_4_if(i < left[r], p.workspace.partial_o + state * T::kHeadDimVo + dim, 0.0F);
          lse[r][i] = load_if(i < left[r], p.workspace.partial_lse + state, -infinity());
        }
      }
      has_more = false;
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
          o[r] = merge_values(o[r], added[r][i],
                              T::Variant::kUseSoftmax ? merged[r].add(lse[r][i]) : kSum);
        }
        left[r] -= kStatesAtOnce;
        at[r] += kStatesAtOnce * T::kTileQ;
        if (left[r] <= 0 && parent[r] != kNoMerge) begin(r, p.schedule.merges[parent[r]]);
        has_more = has_more || left[r] > 0 || parent[r] != kNoMerge;
      }
    } while (has_more);
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      if (quad < num_quads[r]) {
        const float scale = T::Variant::kUseSoftmax ? merged[r].inverse() : 1.0F;
        write_result<T>(p, variant, merge_of(r).rows, merge_of(r).kv_head, row, dim, o[r], scale,
                        merged[r].lse());
      }
    }
  }
}

}  // namespace flashplan::device
