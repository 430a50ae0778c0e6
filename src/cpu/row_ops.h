// SPDX-License-Identifier: Apache-2.0
// The small operators on the CPU. Their arguments have been checked.
#pragma once

#include <cstdint>

#include "flashplan/kv_cache.h"
#include "flashplan/merge.h"

namespace flashplan::cpu {

void append_paged_kv(const AppendTensors& tensors) noexcept;

void merge_states(const AttentionState* states, int32_t num_states,
                  const AttentionState& out) noexcept;

}  // namespace flashplan::cpu
