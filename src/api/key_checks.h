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

/// The number of pages that k, k_tail and v all have, but at most what int32 page ids can name.
int32_t num_pages_of(const AttentionTensors& t);

/// Checks that neither v nor a scale of v is given to a plan with shared_kv.
Status check_values_given(const AttentionTensors& t, const AttentionOptions& options);

/// Checks `tail`, the tensor with the last dims of queries or keys, if it is given: that the plan
/// has shared_kv and such dims, and the tensor's dtype and device. `whole`: the tensor with the
/// other dims.
Status check_tail(const TensorArgument& tail, const TensorArgument& whole, DType dtype,
                  const AttentionOptions& options);

/// Checks the tensor that a plan without shared_kv may get: the last dims of ragged keys, which all
/// kv heads have in common.
Status check_common_tail(const TensorArgument& tail, const Plan::Impl& plan);

/// Checks the lists of keys, except their values.
Status check_lists(const AttentionTensors& t, const Plan::Impl& plan);

/// Checks the values of lists in host memory that have passed check_lists(). A plan reads only the
/// first min(topk, kv_len) entries of a list, so no later entry may name a key.
Status check_list_values(const AttentionTensors& t, const Plan::Impl& plan);

}  // namespace flashplan
