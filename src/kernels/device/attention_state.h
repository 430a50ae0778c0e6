// SPDX-License-Identifier: Apache-2.0
// Attention states (o, lse) in memory: results, partial results, and the operator (+) that merges
// them (FlashInfer, section 2.2). Every merge of the attention kernels applies (+) to one state
// after the other. The plan fixes their order, so that the result does not depend on which CTA
// merges.
//
// NaN and infinity are valid results (flashplan/plan.h has the contract):
// - A visible logit of NaN or +inf makes the sum of weights NaN, as exp2(NaN) and exp2(inf - inf)
//   are. The maximum ignores NaN (fmaxf); sums and o keep it.
// - So lse and o follow from the sum alone: a sum of 0 means that no key had any weight, and gives
//   o = 0 and lse = -inf. Any other sum, NaN included, needs no special case. Test sums with == 0,
//   which is false for NaN, and never with > 0.
// - A merge gives a state with lse = -inf the weight 0. A state with lse = NaN or +inf makes the
//   merged sum NaN.
#pragma once

#include "kernels/device/numeric.h"
#include "kernels/device/row_block.h"

namespace flashplan::device {

/// The states merged so far. Let w_i = exp(lse_i - max) for state i, with the largest lse_i as max.
/// Then sum is the sum of w_i, and the caller holds o, the sum of w_i * o_i.
struct MergedRow {
  float max;
  float sum;

  FLASHPLAN_DEVICE void reset() {
    max = -infinity();
    sum = 0.0F;
  }

  /// Adds a state. Returns the factors by which o so far, and the o of the added state, are
  /// multiplied.
  FLASHPLAN_DEVICE float2 add(float lse) {
    const float new_max = fmaxf(max, lse);
    const float shift = new_max == -infinity() ? 0.0F : new_max;
    const float2 factors = {exp2_fast((max - shift) * kLog2e), exp2_fast((lse - shift) * kLog2e)};
    max = new_max;
    sum = __fmaf_rn(sum, factors.x, factors.y);
    return factors;
  }
  /// Adds 32 states, whose `lse` the 32 lanes pass. Returns the factor of o so far, and in `weight`
  /// the factor of the o of the lane's state.
  FLASHPLAN_DEVICE float add_of_lanes(float lse, float* weight) {
    float new_max = fmaxf(max, lse);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffU, new_max, step));
    }
    const float shift = new_max == -infinity() ? 0.0F : new_max;
    const float shrink = exp2_fast((max - shift) * kLog2e);
    *weight = exp2_fast((lse - shift) * kLog2e);
    float added = *weight;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) added += __shfl_xor_sync(0xffffffffU, added, step);
    max = new_max;
    sum = __fmaf_rn(sum, shrink, added);
    return shrink;
  }
  /// The factor that o is multiplied by after the last state.
  FLASHPLAN_DEVICE float inverse() const { return sum == 0.0F ? 0.0F : reciprocal_fast(sum); }
  FLASHPLAN_DEVICE float lse() const {
    return sum == 0.0F ? -infinity() : max + log2_fast(sum) * kLn2;
  }
};

/// The first of the counters by which CTAs arrive at a merge.
FLASHPLAN_DEVICE int32_t* counter_of(const AttentionParams& p, int32_t merge) {
  return p.schedule.arrivals[merge].counters;
}

/// The longest time that a CTA waits for other CTAs: about 20 us at 1.8 GHz.
constexpr int64_t kMostClocksOfWait = 36000;

/// Delays the arrival of a request at its merge until its prefixes have arrived there, so that each
/// CTA merges the requests that it has computed. Otherwise the CTA that ends a prefix merges all
/// of its requests, one after the other, while the other CTAs are idle. After some time the
/// request arrives anyway: the CTA of a prefix may not have started yet, and may start only when
/// this CTA has ended. The result does not depend on which CTA merges. Returns the number of
/// arrivals at the merge so far. The caller can then read what the arrived CTAs wrote before.
FLASHPLAN_DEVICE int32_t wait_for_prefixes(const Merge& merge, const int32_t* arrivals) {
  const int64_t begin = clock64();
  // num_pieces counts the request's own work tiles and its prefixes. num_states is the number of
  // own tiles: only batch-invariant plans, which share no prefixes, have more states than tiles.
  const int32_t num_prefixes = merge.num_pieces - merge.num_states;
  int32_t arrived;
  do {
    arrived = load_acquire(arrivals);
  } while (arrived < num_prefixes && clock64() - begin < kMostClocksOfWait);
  return arrived;
}

/// Arrives at a merge. Returns whether this was the last of the `expected` arrivals, and then sets
/// the counter to 0 for the next run.
FLASHPLAN_DEVICE bool is_last_to_arrive(int32_t* counter, int32_t expected) {
  const bool is_last = arrive(counter) + 1 == expected;
  if (is_last) *counter = 0;
  return is_last;
}

/// What the values of a kv head are multiplied by.
FLASHPLAN_DEVICE float v_scale(const AttentionParams& p, int32_t kv_head) {
  return p.variant.v_scale * p.variant.v_scales.of(kv_head);
}

/// The attention sink of a query head.
FLASHPLAN_DEVICE float sink_of(const Sinks& sinks, uint32_t qo_head) {
  if (!sinks.are_bfloat16) return static_cast<const float*>(sinks.data)[qo_head];
  return __uint_as_float(uint32_t{static_cast<const uint16_t*>(sinks.data)[qo_head]} << 16);
}

/// Adds an attention sink, which is a state with o = 0 and lse = `sink`, to a row whose log-sum-exp
/// is `lse`. Returns {factor of the row's o, new lse}. Only code that writes final rows may call
/// it, because each row must get its sink once.
FLASHPLAN_DEVICE float2 with_sink(float sink, float lse) {
  MergedRow merged;
  merged.reset();
  merged.add(lse);
  const float shrink = merged.add(sink).x;
  return {shrink * merged.inverse(), merged.lse()};
}

FLASHPLAN_DEVICE float merge_value(float merged, float added, float2 factors) {
  return __fmaf_rn(added, factors.y, __fmul_rn(merged, factors.x));
}
FLASHPLAN_DEVICE float4 merge_values(float4 merged, float4 added, float2 factors) {
  return {merge_value(merged.x, added.x, factors), merge_value(merged.y, added.y, factors),
          merge_value(merged.z, added.z, factors), merge_value(merged.w, added.w, factors)};
}

FLASHPLAN_DEVICE float4 scaled(float4 x, float scale) {
  return {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
}

/// Writes the first `num_valid` of 4 dims of a row of o, at any alignment. It is not inlined, so
/// that the code for aligned tensors stays short and is fetched sooner.
inline __device__ __noinline__ void store_unaligned(void* row, DType dtype, int num_valid,
                                                    float4 x) {
  const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= num_valid) return;
    if (dtype == DType::kFloat32) {
      static_cast<float*>(row)[i] = values[i];
    } else {
      const uint32_t pair = dtype == DType::kFloat16
                                ? Element<DType::kFloat16>::pack(values[i], 0.0F)
                                : Element<DType::kBFloat16>::pack(values[i], 0.0F);
      static_cast<uint16_t*>(row)[i] = static_cast<uint16_t>(pair);
    }
  }
}

/// The dtype of o. Kernels that are compiled at run time are compiled for one dtype.
template <typename Variant>
FLASHPLAN_DEVICE DType o_dtype(const AttentionParams& p) {
  if constexpr (Variant::kIsBuiltIn) {
    return p.tensors.o_dtype;
  } else {
    return Variant::kOutput;
  }
}

/// Writes dims [dim, dim + 4) of a row of o, which begins at `element`, in the dtype of o.
template <typename Variant>
FLASHPLAN_DEVICE void store_four(const AttentionParams& p, int64_t element, int dim, float4 x) {
  const int num_valid = p.tensors.head_dim_vo - dim;
  const DType dtype = o_dtype<Variant>(p);
  const bool is_wide = dtype == DType::kFloat32;
  unsigned char* to =
      static_cast<unsigned char*>(p.tensors.o.data) + (element + dim) * (is_wide ? 4 : 2);
  if (!p.tensors.vectorized) {
    store_unaligned(to, dtype, num_valid, x);
  } else if (num_valid <= 0) {
    return;
  } else if (is_wide) {
    *reinterpret_cast<float4*>(to) = x;
  } else if (dtype == DType::kFloat16) {
    using Out = Element<DType::kFloat16>;
    *reinterpret_cast<uint2*>(to) = {Out::pack(x.x, x.y), Out::pack(x.z, x.w)};
  } else {
    using Out = Element<DType::kBFloat16>;
    *reinterpret_cast<uint2*>(to) = {Out::pack(x.x, x.y), Out::pack(x.z, x.w)};
  }
}

/// Where row `row` of a work tile is in o and lse.
struct OutputRow {
  uint32_t token;
  uint32_t head;

  FLASHPLAN_DEVICE OutputRow(const AttentionParams& p, const PackedRows& rows, int32_t kv_head,
                             int row)
      : token(rows.token(row, p.schedule.group_size)),
        head(static_cast<uint32_t>(rows.qo_head(kv_head, row, p.schedule.group_size))) {}

  /// The offset of the row in o, in elements.
  FLASHPLAN_DEVICE int64_t o(const AttentionParams& p) const {
    return token * p.tensors.o.token_stride + head * p.tensors.o.head_stride;
  }
  /// Writes a natural log-sum-exp in the base that the caller wants. p.tensors.lse.data must not be
  /// null.
  FLASHPLAN_DEVICE void write_lse(const AttentionParams& p, float lse) const {
    p.tensors.lse.data[token * p.tensors.lse.token_stride + head * p.tensors.lse.head_stride] =
        lse * p.tensors.lse_scale;
  }
};

}  // namespace flashplan::device
