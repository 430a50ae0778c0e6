// SPDX-License-Identifier: Apache-2.0
// What holds of the lengths of every batch.
#pragma once

#include "flashplan/plan.h"
#include "flashplan/status.h"

namespace flashplan {

/// That qo_indptr starts at 0 and ascends, and no kv_len is negative.
Status check_lengths(const Batch& batch) noexcept;

}  // namespace flashplan
