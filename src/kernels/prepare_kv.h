// SPDX-License-Identifier: Apache-2.0
// The kernel that prepares keys; see plan/prepared_kv.h.
#pragma once

#include "abi/params.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan::cuda {

/// Loads the kernels for keys of `dtype` on the current device. Before the first launch, since
/// loading them would break a capture.
Status load_kv_preparation(DType dtype) noexcept;

/// Writes the prepared keys of params.prepared on `stream` of the current device, with CTAs for
/// `num_sms` SMs. The attention kernel with the same `params` must follow on the stream. Keys are
/// rotated by params.host.rope, if there is one. Of requests that are shorter than planned
/// (params.tensors.kv_lens) no key past the real length is read.
Status prepare_kv(const AttentionParams& params, int32_t num_sms, Stream stream) noexcept;

}  // namespace flashplan::cuda
