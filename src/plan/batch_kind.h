// SPDX-License-Identifier: Apache-2.0
// Which kind of kernel is the faster one for a batch, and for the batches within a plan's bounds.
#pragma once

#include <cstdint>

#include "flashplan/plan.h"
#include "plan/kernel.h"

namespace flashplan {

constexpr BatchKind other_kind(BatchKind kind) noexcept {
  return kind == BatchKind::kFewRows ? BatchKind::kManyRows : BatchKind::kFewRows;
}

/// Few rows where there is no room for more than a query per request.
BatchKind kind_of_bounds(const AttentionOptions& options) noexcept;

/// Whether batches of both kinds are within the bounds, so that a plan should have a kernel for
/// each. Plans with a variant or a rotation have one kernel, because each is compiled for itself.
bool allows_both_kinds(const AttentionOptions& options) noexcept;

/// The kind of a batch whose lengths have been checked, without its shared prefixes.
BatchKind kind_of(const Batch& batch, const AttentionOptions& options) noexcept;

/// Whether the shared prefixes of a batch of few rows may save so much that the kernel for many
/// rows is faster, for whose large tiles a prefix is less work. Its schedule tells: see
/// Scheduler::gains_by_prefixes(). `num_shared_keys`: PrefixGroups::num_shared_keys();
/// `num_processors`: SMs of the GPU.
bool may_gain_by_prefixes(const Batch& batch, const AttentionOptions& options,
                          int64_t num_shared_keys, int32_t num_processors) noexcept;

}  // namespace flashplan
