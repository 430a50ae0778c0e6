// SPDX-License-Identifier: Apache-2.0
// The families of GPU kernels, as values. Their geometry is in <family>.h, their costs are in
// plan/kernel/tuning.cpp.
#pragma once

#include "flashplan/plan.h"
#include "plan/kernel/kernel.h"
#include "variant/variant_impl.h"

namespace flashplan {

/// The first axis of the options that a kernel of the sm80 family does not serve. It serves no
/// rotation of 8-bit keys, because it would have to store the rotated keys in shared memory in 8
/// bits, which are too few.
inline Axis first_unserved_by_sm80(const Kernel& kernel, const AttentionOptions& options) noexcept {
  const Axis axis = first_unserved_axis(kernel, options);
  if (axis != Axis::kNone) return axis;
  return options.rope && item_size(options.kv_dtype) == 1 ? Axis::kRope : Axis::kNone;
}

/// Uses mma.sync, ldmatrix and cp.async, which every GPU from compute capability 8.0 on has.
inline constexpr KernelFamily kSm80Family = {.name = "sm80",
                                             .device = DeviceType::kCuda,
                                             .program = &kSm80Program,
                                             .shares_prefixes = true,
                                             .first_unserved = first_unserved_by_sm80,
                                             .scratch_bytes = merged_state_bytes,
                                             .preference = no_preference};

/// The first axis that a kernel of the sm90 family does not serve. The family serves no variants
/// that change keys or values. It serves no rotations with values of more than 128 dims, because
/// the warpgroup that rotates leaves the other warpgroups too few registers for their products.
inline Axis first_unserved_by_sm90(const Kernel& kernel, const AttentionOptions& options) noexcept {
  const Axis axis = first_unserved_axis(kernel, options);
  if (axis != Axis::kNone) return axis;
  const Variant::Impl* variant = options.variant.impl();
  if (variant != nullptr && variant->changes_keys_or_values()) return Axis::kVariant;
  return options.rope && !kernel.rotating_geometry ? Axis::kRope : Axis::kNone;
}

inline bool has_aligned_dims(const AttentionOptions& options) noexcept {
  constexpr int32_t kAlignedDims = 8;
  return options.head_dim_qk % kAlignedDims == 0 && options.head_dim_vo % kAlignedDims == 0;
}

/// Prefers sm90 to sm80 where tensor maps can describe the keys, and the batch has many rows.
/// Without tensor maps sm90 works, too, but is slower. For few rows sm80 is 4 to 30 % faster: two
/// of its CTAs share an SM, and its shorter code begins sooner (docs/tuning/sm80.md).
inline int32_t preference_of_sm90(const AttentionOptions& options, BatchKind kind) noexcept {
  const bool is_faster = kind == BatchKind::kManyRows;
  return has_aligned_dims(options) && has_boxes(options) && is_faster ? 1 : -1;
}

/// Uses wgmma, which only GPUs of compute capability 9.0 have, and TMA with mbarriers.
inline constexpr KernelFamily kSm90Family = {.name = "sm90",
                                             .device = DeviceType::kCuda,
                                             .group = KernelGroup::kHopper,
                                             .program = &kSm90Program,
                                             .shares_prefixes = true,
                                             .merges_readers_last = true,
                                             .first_unserved = first_unserved_by_sm90,
                                             .scratch_bytes = no_scratch_bytes,
                                             .preference = preference_of_sm90};

/// The first axis that a kernel of sm90_gather (small pages), sm90_widen (8-bit caches) or
/// sm90_wide (wide heads) does not serve. These families serve neither variants nor rotations.
inline Axis first_unserved_by_sm90_gather(const Kernel& kernel,
                                          const AttentionOptions& options) noexcept {
  const Axis axis = first_unserved_by_sm90(kernel, options);
  if (axis != Axis::kNone) return axis;
  return options.variant.impl() != nullptr ? Axis::kVariant : Axis::kNone;
}
/// Prefers sm90_gather to sm80 and sm90 where pages are too small for boxes, and the batch has many
/// rows.
inline int32_t preference_of_sm90_gather(const AttentionOptions& options, BatchKind kind) noexcept {
  const bool is_faster = kind == BatchKind::kManyRows;
  return has_aligned_dims(options) && !has_boxes(options) && is_faster ? 1 : -2;
}

/// The sm90 family, with keys and values copied row by row by cp.async instead of TMA.
inline constexpr KernelFamily kSm90GatherFamily = {.name = "sm90_gather",
                                                   .device = DeviceType::kCuda,
                                                   .group = KernelGroup::kHopper,
                                                   .shares_prefixes = true,
                                                   .merges_readers_last = true,
                                                   .first_unserved = first_unserved_by_sm90_gather,
                                                   .scratch_bytes = no_scratch_bytes,
                                                   .preference = preference_of_sm90_gather};

/// Prefers sm90_widen to sm80 where the batch has many rows. Ragged keys of more than 128 dims are
/// an exception, because a run may have them in two tensors, which sm90_widen does not take.
inline int32_t preference_of_sm90_widen(const AttentionOptions& options, BatchKind kind) noexcept {
  const bool may_have_tails = options.page_size == 0 && options.head_dim_qk > 128;
  const bool is_faster = kind == BatchKind::kManyRows;
  return has_aligned_dims(options) && !may_have_tails && is_faster ? 1 : -2;
}

/// The sm90 family with keys and values of 8 bits, which one warpgroup widens to 16 bits.
inline constexpr KernelFamily kSm90WidenFamily = {.name = "sm90_widen",
                                                  .device = DeviceType::kCuda,
                                                  .group = KernelGroup::kHopper,
                                                  .shares_prefixes = true,
                                                  .merges_readers_last = true,
                                                  .first_unserved = first_unserved_by_sm90_gather,
                                                  .scratch_bytes = no_scratch_bytes,
                                                  .preference = preference_of_sm90_widen};

/// Prefers sm90_wide to sm80 where the batch has many rows, and tensor maps can describe the keys.
inline int32_t preference_of_sm90_wide(const AttentionOptions& options, BatchKind kind) noexcept {
  constexpr int32_t kBlockDims = 64;
  const bool has_whole_blocks =
      options.head_dim_qk % kBlockDims == 0 && options.head_dim_vo % kBlockDims == 0;
  const bool is_faster = kind == BatchKind::kManyRows;
  return has_whole_blocks && has_boxes(options) && is_faster ? 1 : -2;
}

/// Uses wgmma, TMA and mbarriers for more than 256 dims. Each of two warpgroups computes half of
/// the columns of o.
inline constexpr KernelFamily kSm90WideFamily = {.name = "sm90_wide",
                                                 .device = DeviceType::kCuda,
                                                 .group = KernelGroup::kHopper,
                                                 .first_unserved = first_unserved_by_sm90_gather,
                                                 .scratch_bytes = merged_state_bytes,
                                                 .preference = preference_of_sm90_wide};

/// The first axis that a kernel of the sm90_mla family does not serve. It serves exactly the head
/// dims that it is compiled for.
inline Axis first_unserved_by_sm90_mla(const Kernel& kernel,
                                       const AttentionOptions& options) noexcept {
  const Axis axis = first_unserved_axis(kernel, options);
  const bool has_dims =
      kernel.head_dim_qk == options.head_dim_qk && kernel.head_dim_vo == options.head_dim_vo;
  return !has_dims && axis > Axis::kHeadDim ? Axis::kHeadDim : axis;
}

/// Uses wgmma, TMA and mbarriers for multi-head latent attention: values are the first dims of
/// keys.
inline constexpr KernelFamily kSm90MlaFamily = {.name = "sm90_mla",
                                                .device = DeviceType::kCuda,
                                                .group = KernelGroup::kHopper,
                                                .shared_kv = true,
                                                .first_unserved = first_unserved_by_sm90_mla,
                                                .scratch_bytes = merged_state_bytes,
                                                .preference = no_preference};

/// Prefers sm90_mla_pairs to sm90_mla where an average request has more rows than one CTA of
/// sm90_mla takes. Two sorts of plans count the rows of one token only: batch-invariant plans,
/// where the kernel of a request must not depend on other requests, and plans with topk, where each
/// token is a request of its own.
inline int32_t preference_of_sm90_mla_pairs(const AttentionOptions& options,
                                            BatchKind /*kind*/) noexcept {
  constexpr int64_t kRowsOfCta = 64;
  const bool counts_one_token = options.batch_invariant || options.topk > 0;
  const int64_t tokens =
      counts_one_token ? 1 : (options.max_qo_tokens - 1) / options.max_batch_size + 1;
  const int32_t group_size = options.num_qo_heads / options.num_kv_heads;
  return tokens * group_size > kRowsOfCta ? 1 : -1;
}

/// The sm90_mla family over caches of 8 bits, with pairs of CTAs. Each CTA of a pair widens half of
/// the keys for both CTAs.
inline constexpr KernelFamily kSm90MlaPairsFamily = [] {
  KernelFamily family = kSm90MlaFamily;
  family.name = "sm90_mla_pairs";
  family.preference = preference_of_sm90_mla_pairs;
  return family;
}();

}  // namespace flashplan
