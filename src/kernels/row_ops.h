// SPDX-License-Identifier: Apache-2.0
// The small operators on CUDA: one launch on `stream` each. Their arguments have been checked but
// for the values of index tensors, which lie on the device.
#pragma once

#include <cstdint>

#include "flashplan/kv_cache.h"
#include "flashplan/merge.h"

namespace flashplan::cuda {

/// Tokens whose page id lies outside the cache are not written.
Status append_paged_kv(const AppendTensors& tensors, Stream stream) noexcept;

///   kUnsupported  more states than the kernel's argument holds, and not slices of one tensor
Status merge_states(const AttentionState* states, int32_t num_states, const AttentionState& out,
                    Stream stream) noexcept;

}  // namespace flashplan::cuda
