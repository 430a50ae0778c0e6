// SPDX-License-Identifier: Apache-2.0
// The checks and parameters that append_paged_kv() and rope_append_paged_kv() have in common.
#pragma once

#include "checks/memory_checks.h"
#include "flashplan/kv_cache.h"
#include "ops/params.h"

namespace flashplan {

/// Checks everything about `tensors` except the values in index tensors and in scales.
Status check_append(const AppendTensors& tensors) noexcept;

/// Checks the values of index tensors and scales, which are in host memory. `q` is empty, or must
/// have a row for each token, too.
Status check_append_values(const AppendTensors& tensors, const TensorView& q) noexcept;

/// The parameters of tensors that have been checked. `q` is empty, or has a row for each token.
AppendParams make_append_params(const AppendTensors& tensors, const TensorView& q) noexcept;

/// Whether there are tokens and elements to write.
bool has_work(const AppendParams& params) noexcept;

}  // namespace flashplan
