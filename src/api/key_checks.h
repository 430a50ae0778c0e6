// SPDX-License-Identifier: Apache-2.0
// Checks of the tensors that multi-head latent attention adds to run(): keys that are values too,
// last dims in a tensor of their own, and lists of keys.
#pragma once

#include <cstdint>

#include "api/plan_impl.h"
#include "checks/memory_checks.h"
#include "flashplan/plan.h"
#include "flashplan/status.h"

namespace flashplan {

/// The number of pages that all caches have, but at most as many as int32 page ids can name.
int32_t num_pages_of(const AttentionTensors& t);

/// With shared_kv: checks that neither v nor a scale of v is given.
Status check_values_given(const AttentionTensors& t, const AttentionOptions& options);

/// With shared_kv: checks dtype and device of `tail`, the tensor with the last dims of queries or
/// keys, if it is given. `whole`: the tensor with the other dims.
Status check_tail(const TensorArgument& tail, const TensorArgument& whole, DType dtype,
                  const AttentionOptions& options);

/// Without shared_kv: checks the tensor with the last dims of ragged keys, which all kv heads have
/// in common.
Status check_common_tail(const TensorArgument& tail, const Plan::Impl& plan);

/// Checks the lists of keys, except their values.
Status check_lists(const AttentionTensors& t, const Plan::Impl& plan);

/// Checks the values of lists in host memory that have passed check_lists(): no list may name keys
/// behind the length that plan() got.
Status check_list_values(const AttentionTensors& t, const Plan::Impl& plan);

}  // namespace flashplan
