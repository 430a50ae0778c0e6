// SPDX-License-Identifier: Apache-2.0
// Where and how results of the sm90 family are written: their dtype, sinks and variants.
#pragma once

#include "kernels/device/attention_state.h"
#include "kernels/device/row_block.h"
#include "kernels/device/sm90/shape.h"

namespace flashplan::device {

/// Applies the variant's `output` to elements of a row.
template <typename S>
struct Sm90RowOutput {
  const AttentionParams& p;
  ElementPosition at;  // position of dim 0 of the row

  FLASHPLAN_DEVICE Sm90RowOutput(const AttentionParams& p, const PackedRows& rows, int32_t kv_head,
                                 int row)
      : p(p), at() {
    if constexpr (S::Variant::kTransformsOutput) {
      at = element_position(p, rows, first_position(p, rows), kv_head, row, 0);
    }
  }
  FLASHPLAN_DEVICE float operator()(float x, int dim) const {
    if constexpr (!S::Variant::kTransformsOutput) return x;
    // Dims past the last one are not written. The variant gets the last dim instead of them, since
    // it may only be asked for dims that exist.
    return typename S::Variant(p).output(x, at.next(min(dim, p.tensors.head_dim_vo - 1)));
  }
};

/// Writes elements of o, and adds sinks. All functions are inlined, because before a call the
/// compiler would wait for the products in flight.
template <typename S>
class Sm90Output {
 public:
  explicit FLASHPLAN_DEVICE Sm90Output(const AttentionParams& p) : p_(p) {}

  FLASHPLAN_DEVICE DType dtype() const { return device::o_dtype<typename S::Variant>(p_); }
  /// Whether o has the dtype of the kernel, in rows of aligned chunks of 16 bytes.
  FLASHPLAN_DEVICE bool has_chunks() const {
    return p_.tensors.vectorized && dtype() == S::kOutput;
  }

  /// Adds the attention sink of a query head to a row: changes `scale`, the factor of the row's o,
  /// and its lse.
  FLASHPLAN_DEVICE void add_sink(uint32_t qo_head, float& scale, float& lse) const {
    asm volatile("");  // keeps this a branch instead of selects for every row
    const float2 joined = with_sink(sink_of(p_.variant.sinks, qo_head), lse);
    scale *= joined.x;
    lse = joined.y;
  }

  FLASHPLAN_DEVICE void write_one(int64_t element, float x) const {
    if (dtype() == DType::kFloat32) {
      static_cast<float*>(p_.tensors.o.data)[element] = x;
    } else {
      const uint32_t pair = dtype() == DType::kFloat16 ? Element<DType::kFloat16>::pack(x, 0.0F)
                                                       : Element<DType::kBFloat16>::pack(x, 0.0F);
      static_cast<uint16_t*>(p_.tensors.o.data)[element] = static_cast<uint16_t>(pair);
    }
  }

 private:
  const AttentionParams& p_;
};

}  // namespace flashplan::device
