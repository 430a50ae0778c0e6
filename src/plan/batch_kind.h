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

/// The kind of a batch whose lengths have been checked. `num_shared_keys`: by how many keys its
/// shared prefixes shorten the requests, in all. `num_processors`: SMs of the GPU.
BatchKind kind_of(const Batch& batch, const AttentionOptions& options, int64_t num_shared_keys,
                  int32_t num_processors) noexcept;

}  // namespace flashplan
