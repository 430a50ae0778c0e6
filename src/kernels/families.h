// SPDX-License-Identifier: Apache-2.0
// The families of GPU kernels, as values. Their geometry is in <family>.h, their costs are in
// plan/tuning.cpp.
#pragma once

#include "flashplan/plan.h"
#include "plan/kernel.h"
#include "variant/variant_impl.h"

namespace flashplan {

/// What the sm80 family is compiled for. Keys are rotated in shared memory, in place, for which 8
/// bits are too few.
inline Axis first_unserved_by_sm80(const Kernel& kernel, const AttentionOptions& options) noexcept {
  const Axis axis = first_unserved_axis(kernel, options);
  if (axis != Axis::kNone) return axis;
  return options.rope && options.kv_dtype != options.q_dtype ? Axis::kRope : Axis::kNone;
}

/// mma.sync, ldmatrix and cp.async, which every GPU from compute capability 8.0 on has.
inline constexpr KernelFamily kSm80Family = {.name = "sm80",
                                             .device = DeviceType::kCuda,
                                             .shares_prefixes = true,
                                             .first_unserved = first_unserved_by_sm80,
                                             .scratch_bytes = merged_state_bytes,
                                             .preference = no_preference};

/// What the sm90 family is compiled for, but for batch-invariant results, and variants that change
/// keys or values. A warpgroup that rotates leaves too few registers for the products of more than
/// 128 dims.
inline Axis first_unserved_by_sm90(const Kernel& kernel, const AttentionOptions& options) noexcept {
  const Axis axis = first_unserved_axis(kernel, options);
  if (axis != Axis::kNone) return axis;
  if (options.batch_invariant) return Axis::kBatchInvariant;
  const Variant::Impl* variant = options.variant.impl();
  if (variant != nullptr && variant->changes_keys_or_values()) return Axis::kVariant;
  return options.rope && !kernel.rotating_geometry ? Axis::kRope : Axis::kNone;
}

/// Above sm80 where tensor maps can describe the keys, and the bounds of the plan leave room for
/// more than the few packed rows of a decode. For those alone sm80 is 2 to 9 % faster: two of its
/// CTAs share an SM, and its shorter code begins sooner (docs/tuning.md). Without tensor maps
/// everything works, but slower.
inline int32_t preference_of_sm90(const AttentionOptions& options) noexcept {
  constexpr int32_t kFewRows = 16;
  constexpr int32_t kAlignedDims = 8;
  const bool is_mapped = options.head_dim_qk % kAlignedDims == 0 &&
                         options.head_dim_vo % kAlignedDims == 0 && options.page_size % 8 == 0;
  const bool decodes_few_rows = options.max_qo_tokens <= options.max_batch_size &&
                                options.num_qo_heads <= kFewRows * options.num_kv_heads;
  return is_mapped && !decodes_few_rows ? 1 : -1;
}

/// wgmma, TMA and mbarriers, which compute capability 9.0 alone has.
inline constexpr KernelFamily kSm90Family = {.name = "sm90",
                                             .device = DeviceType::kCuda,
                                             .shares_prefixes = true,
                                             .first_unserved = first_unserved_by_sm90,
                                             .scratch_bytes = merged_state_bytes,
                                             .preference = preference_of_sm90};

}  // namespace flashplan
