// SPDX-License-Identifier: Apache-2.0
// Checks of the batch that a caller gives to plan().
#pragma once

#include "flashplan/plan.h"
#include "flashplan/status.h"

namespace flashplan {

/// Checks that qo_indptr starts at 0 and ascends, and that no kv_len is negative.
Status check_lengths(const Batch& batch) noexcept;

/// Checks all of a batch but its shared prefixes, which PrefixGroups::read() checks: the lengths,
/// the bounds of the plan, and the arrays that only some plans take.
Status check_batch(const AttentionOptions& options, const Batch& batch) noexcept;

}  // namespace flashplan
