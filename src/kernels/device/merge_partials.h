// SPDX-License-Identifier: Apache-2.0
// Results and the merging of partial results, by all threads of a CTA.
#pragma once

#include "kernels/device/attention_state.h"

namespace flashplan::device {

/// Factors where states add up without weights.
constexpr float2 kSum = {1.0F, 1.0F};

/// Writes dims [dim, dim + 4) of a row's result, scale * o, and with the first ones its lse. Scales
/// are multiplied first, as in Epilogue: bits must not depend on how a tensor is aligned.
template <typename T>
FLASHPLAN_DEVICE void write_result(const AttentionParams& p, const typename T::Variant& variant,
                                   const PackedRows& rows, int32_t kv_head, int row, int dim,
                                   float4 o, float scale, float lse) {
  const OutputRow to(p, rows, kv_head, row);
  o = scaled(o, scale * p.variant.v_scale);
  if constexpr (T::Variant::kTransformsOutput) {
    const ElementPosition at = element_position(p, rows, kv_head, row, dim);
    o = {variant.output(o.x, at), variant.output(o.y, at.next(1)), variant.output(o.z, at.next(2)),
         variant.output(o.w, at.next(3))};
  }
  store_four(p, to.o(p), dim, o);
  if (dim == 0 && p.tensors.lse.data != nullptr) p.tensors.lse.data[to.lse(p)] = lse;
}

/// Merges partial results in the order of their keys, and writes o and lse. A thread
/// has 4 dims of kRowsAtOnce rows and kStatesAtOnce states of them under way: memory is far.
template <typename T, int kRowsAtOnce, int kStatesAtOnce>
FLASHPLAN_DEVICE void merge_partials(const AttentionParams& p, const Merge& merge) {
  constexpr int kQuads = T::kHeadDimVo / 4;
  constexpr int kStateFloats = T::kTileQ * T::kHeadDimVo;
  const typename T::Variant variant(p);
  const int num_quads = merge.rows.num_rows * kQuads;
  for (int begin = static_cast<int>(threadIdx.x); begin < num_quads;
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

}  // namespace flashplan::device
