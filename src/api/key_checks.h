// SPDX-License-Identifier: Apache-2.0
// Checks of what multi-head latent attention adds to run(): keys that are values too, last dims in
// a tensor of their own, and lists of keys.
#pragma once

#include <cstdint>

#include "api/plan_impl.h"
#include "checks/memory_checks.h"
#include "flashplan/plan.h"
#include "flashplan/status.h"

namespace flashplan {

/// How many pages all caches have that page ids, which are int32, can name.
int32_t num_pages_of(const AttentionTensors& t);

/// With shared_kv: that there is neither v nor a scale of it.
Status check_values_given(const AttentionTensors& t, const AttentionOptions& options);

/// With shared_kv: dtype and device of the last dims of queries or keys (`tail`), if they are given
/// beside the others (`whole`).
Status check_tail(const TensorArgument& tail, const TensorArgument& whole, DType dtype,
                  const AttentionOptions& options);

/// Without shared_kv: the last dims of ragged keys, which all kv heads have in common.
Status check_common_tail(const TensorArgument& tail, const Plan::Impl& plan);

/// The lists of keys, but for their values.
Status check_lists(const AttentionTensors& t, const Plan::Impl& plan);

/// The values of checked lists in host memory: no key is behind those that plan() was told of.
Status check_list_values(const AttentionTensors& t, const Plan::Impl& plan);

}  // namespace flashplan
