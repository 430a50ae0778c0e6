// SPDX-License-Identifier: Apache-2.0
// Writes four dims of a result, whatever its dtype and alignment are.
#pragma once

#include "kernels/device/attention_state.h"

namespace flashplan::device {

/// Calls with_sink(). It is not inlined, to keep the code short where there are no sinks.
inline __device__ __noinline__ float2 call_with_sink(Sinks sinks, uint32_t qo_head, float lse) {
  return with_sink(sink_of(sinks, qo_head), lse);
}

/// Lets the sink of a query head join a row's result, scale * o and lse, if there are sinks.
FLASHPLAN_DEVICE void add_sink(const AttentionParams& p, uint32_t qo_head, float& scale,
                               float& lse) {
  if (p.variant.sinks.data == nullptr) return;
  const float2 joined = call_with_sink(p.variant.sinks, qo_head, lse);
  scale *= joined.x;
  lse = joined.y;
}

/// Writes dims [dim, dim + 4) of a row's result, scale * o, and its lse with the first dims.
/// `scale` and v_scale are multiplied with each other first, as Epilogue does for aligned tensors,
/// so that the bits of a result do not depend on the alignment of the tensor.
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
    // For dims past the last one, which are not written, the variant gets the last dim, since it
    // may only be called for dims that exist.
    const auto output = [&](float x, int i) {
      return variant.output(x, at.next(min(i, p.tensors.head_dim_vo - 1 - dim)));
    };
    o = {output(o.x, 0), output(o.y, 1), output(o.z, 2), output(o.w, 3)};
  }
  store_four<typename T::Variant>(p, to.o(p), dim, o);
  if (dim == 0 && p.tensors.lse.data != nullptr) to.write_lse(p, lse);
}

}  // namespace flashplan::device
