// SPDX-License-Identifier: Apache-2.0
// Writing results, and merging partial results by all threads of a CTA.
#pragma once

#include "kernels/device/merge_prefixes.h"

namespace flashplan::device {

/// Not inlined: the path without sinks is then short.
inline __device__ __noinline__ float2 call_with_sink(const float* sink, float lse) {
  return with_sink(*sink, lse);
}

/// Lets the sink of a query head join a row's result, scale * o and lse, if there are sinks.
FLASHPLAN_DEVICE void add_sink(const AttentionParams& p, uint32_t qo_head, float& scale,
                               float& lse) {
  if (p.variant.sinks == nullptr) return;
  const float2 joined = call_with_sink(p.variant.sinks + qo_head, lse);
  scale *= joined.x;
  lse = joined.y;
}

/// Writes dims [dim, dim + 4) of a row's result, scale * o, and its lse with the first dims. The
/// two scales are multiplied with each other first, as in Epilogue, so that the bits of a result do
/// not depend on the alignment of the tensor.
template <typename T>
FLASHPLAN_DEVICE void write_result(const AttentionParams& p, const typename T::Variant& variant,
                                   const PackedRows& rows, int32_t kv_head, int row, int dim,
                                   float4 o, float scale, float lse) {
  const OutputRow to(p, rows, kv_head, row);
  if constexpr (T::Variant::kUseSoftmax) add_sink(p, to.head, scale, lse);
  o = scaled(o, scale * v_scale(p, kv_head));
  if constexpr (T::Variant::kTransformsOutput) {
    const ElementPosition at =
        element_position(p, rows, first_position(p, rows), kv_head, row, dim);
    // Of dims that are not there, the last one is computed, and not written.
    const auto output = [&](float x, int i) {
      return variant.output(x, at.next(min(i, p.tensors.head_dim_vo - 1 - dim)));
    };
    o = {output(o.x, 0), output(o.y, 1), output(o.z, 2), output(o.w, 3)};
  }
  store_four(p, to.o(p), dim, o);
  if (dim == 0 && p.tensors.lse.data != nullptr) p.tensors.lse.data[to.lse(p)] = lse;
}

/// Merges partial results in the order of their keys, and writes o and lse. To hide the latency of
/// memory, a thread loads 4 dims of kStatesAtOnce states of kRowsAtOnce rows at a time.
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

/// Merges requests with their prefixes, by all threads of a CTA, and writes o and lse. Not inlined:
/// it is called where a request and where a prefix ends.
template <typename T, int kCount>
__device__ __noinline__ void merge_sharers(const AttentionParams& p, MergeNumbers<kCount> merges,
                                           int thread) {
  const typename T::Variant variant(p);
  merge_with_prefixes<T, T::kThreads, 8>(
      p, merges, thread, T::kTileQ,
      [&](const PackedRows& rows, int32_t kv_head, int row, int dim, float4 o,
          const MergedRow& merged) {
        const float scale = T::Variant::kUseSoftmax ? merged.inverse() : 1.0F;
        write_result<T>(p, variant, rows, kv_head, row, dim, o, scale, merged.lse());
      });
}

}  // namespace flashplan::device
