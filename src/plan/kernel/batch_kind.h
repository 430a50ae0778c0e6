// SPDX-License-Identifier: Apache-2.0
// Which kind of kernel is the faster one for a batch, and for the batches within a plan's bounds.
#pragma once

#include <cstdint>

#include "flashplan/plan.h"
#include "plan/kernel/kernel.h"

namespace flashplan {

constexpr BatchKind other_kind(BatchKind kind) noexcept {
  return kind == BatchKind::kFewRows ? BatchKind::kManyRows : BatchKind::kFewRows;
}

/// The most packed query rows with which a request counts as one of few rows. In batch-invariant
/// plans a request of a single query always does.
int32_t most_few_rows(const AttentionOptions& options) noexcept;
/// The most queries with which a request counts as one of few rows.
int32_t most_few_queries(const AttentionOptions& options) noexcept;

/// The kind of batches that the plan's bounds are made for: kFewRows if max_qo_tokens is at most
/// max_batch_size, as for decodes, and the query heads of a kv head are few rows.
BatchKind kind_of_bounds(const AttentionOptions& options) noexcept;

/// Whether batches of both kinds are within the bounds, so that a plan should have a kernel for
/// each.
bool allows_both_kinds(const AttentionOptions& options) noexcept;

/// Which kinds of requests a batch has, by their query rows. Requests without queries are of no
/// kind. The lengths of the batch must have been checked.
struct RequestKinds {
  bool few_rows;
  bool many_rows;
};
RequestKinds kinds_of_requests(const Batch& batch, const AttentionOptions& options) noexcept;

/// The kind of a batch: kFewRows, unless one of its requests has many rows.
BatchKind kind_of(const Batch& batch, const AttentionOptions& options) noexcept;

/// Whether each request of a plan with two kernels runs on the kernel for its own number of rows,
/// so that a batch may take both. Batch-invariant plans do this, because the kernel of a request
/// must not depend on other requests. So do plans for prompts over 8-bit caches, because the kernel
/// for many rows would have to widen the keys of each decode in shared memory, which takes longer
/// than launching a second kernel. In other plans all requests of a batch run on one kernel.
bool divides_batches(const AttentionOptions& options) noexcept;

/// Whether a batch of few rows shares so many keys that the kernel for many rows may be faster: the
/// rows of all requests that read a prefix fill the large tiles of that kernel. The caller then
/// makes a schedule for that kernel, and Scheduler::gains_by_prefixes() decides. `num_shared_keys`:
/// how many fewer keys are read if each prefix is read once. `num_processors`: SMs of the GPU.
bool may_gain_by_prefixes(const Batch& batch, const AttentionOptions& options,
                          int64_t num_shared_keys, int32_t num_processors) noexcept;

}  // namespace flashplan
