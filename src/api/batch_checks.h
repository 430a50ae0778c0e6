// SPDX-License-Identifier: Apache-2.0
// Checks of the batch that a caller gives to plan().
#pragma once

#include "flashplan/plan.h"
#include "flashplan/status.h"

namespace flashplan {

/// Checks that qo_indptr starts at 0 and ascends, and that no kv_len is negative.
Status check_lengths(const Batch& batch) noexcept;

/// Checks the lengths of a batch, the bounds that the plan was created with, and kv_indptr,
/// mask_begin and key_ranges, which only some plans take. PrefixGroups::read() checks the shared
/// prefixes.
Status check_batch(const AttentionOptions& options, const Batch& batch) noexcept;

}  // namespace flashplan
