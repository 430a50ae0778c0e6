// SPDX-License-Identifier: Apache-2.0
// Merging requests with the shared prefixes that they read.
#pragma once

#include "kernels/device/attention_state.h"

namespace flashplan::device {

/// Numbers of merges; after the last one kNoMerge.
constexpr int32_t kNoMerge = -1;
template <int kCount>
struct MergeNumbers {
  int32_t numbers[kCount];
};

/// The factors of a merge for variants without softmax: states are added without weights.
constexpr float2 kSum = {1.0F, 1.0F};

/// For each of these merges: merges the partial results of a request's rows in the order of their
/// keys, then those of the prefixes that the request reads, from the innermost outwards. Calls
/// write(rows, kv_head, row, dim, o, merged) for each 4 dims of each row; o is not yet divided by
/// the sum. The result does not depend on which CTA does this. `thread` is one of kThreads, and
/// states are `tile_q` rows apart.
///
/// Several requests are merged side by side, and kStatesAtOnce of their states at a time, so that
/// more loads are in flight: a CTA that ends a prefix may have to merge all requests that read it.
template <typename Choices, int kThreads, int kStatesAtOnce, int kCount, typename Write>
FLASHPLAN_DEVICE void merge_with_prefixes(const AttentionParams& p,
                                          const MergeNumbers<kCount>& merges, int thread,
                                          int32_t tile_q, Write write) {
  constexpr int kQuads = Choices::kHeadDimVo / 4;
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
  for (int quad = thread; quad < most_quads; quad += kThreads) {
    const int row = quad / kQuads;
    const int dim = quad % kQuads * 4;
    MergedRow merged[kCount];
    float4 o[kCount];
    int64_t at[kCount];      // the next state's partial row
    int32_t left[kCount];    // states
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
          const int64_t state = at[r] + i * tile_q;
          added[r][i] = load_4_if(i < left[r],
                                  p.workspace.partial_o + state * Choices::kHeadDimVo + dim, 0.0F);
          lse[r][i] = load_if(i < left[r], p.workspace.partial_lse + state, -infinity());
        }
      }
      has_more = false;
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
          o[r] = merge_values(o[r], added[r][i],
                              Choices::Variant::kUseSoftmax ? merged[r].add(lse[r][i]) : kSum);
        }
        left[r] -= kStatesAtOnce;
        at[r] += kStatesAtOnce * tile_q;
        if (left[r] <= 0 && parent[r] != kNoMerge) begin(r, p.schedule.merges[parent[r]]);
        has_more = has_more || left[r] > 0 || parent[r] != kNoMerge;
      }
    } while (has_more);
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      if (quad < num_quads[r]) {
        write(merge_of(r).rows, merge_of(r).kv_head, row, dim, o[r], merged[r]);
      }
    }
  }
}

}  // namespace flashplan::device
