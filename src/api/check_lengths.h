// SPDX-License-Identifier: Apache-2.0
// Checks that the lengths of every batch must pass.
#pragma once

#include "flashplan/plan.h"
#include "flashplan/status.h"

namespace flashplan {

/// Checks that qo_indptr starts at 0 and ascends, and that no kv_len is negative.
Status check_lengths(const Batch& batch) noexcept;

}  // namespace flashplan
