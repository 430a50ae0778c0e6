// SPDX-License-Identifier: Apache-2.0
// Each operator on the CPU and on CUDA. The arguments have been checked, except for the values of
// tensors on a GPU. There is at least one row and one element.
#pragma once

#include <cstdint>

#include "flashplan/merge.h"
#include "flashplan/status.h"
#include "ops/mla_params.h"
#include "ops/params.h"

namespace flashplan::cpu {

void append_paged_kv(const AppendParams& params) noexcept;
void rope_append_paged_kv(const RopeAppendParams& params) noexcept;
void append_mla(const MlaAppendParams& params) noexcept;
void gather_mla(const MlaGatherParams& params) noexcept;
/// ln_base: the natural logarithm of the base of every lse, which is e or 2.
void merge_states(const AttentionState* states, int32_t num_states, const AttentionState& out,
                  float ln_base) noexcept;
void norm(const NormParams& params) noexcept;
void gated_activation(const ActivationParams& params) noexcept;
void gather_rows(const GatherParams& params) noexcept;
void apply_rope(const RopeParams& params) noexcept;
void quantize_fp8(const QuantizeParams& params) noexcept;

/// If a row has an error, returns the error of the first such row, and writes nothing.
Status sample(const SampleParams& params) noexcept;

/// If a row has an error, returns the error of the first such row, and writes nothing.
Status filter_rows(const FilterParams& params) noexcept;
/// Must be called after sample(), which checks the rows.
void list_logprobs(const FilterParams& params) noexcept;

/// If a request has an error, returns the error of the first such request, and writes nothing.
Status speculative_verify(const VerifyParams& params) noexcept;
void softmax(const SoftmaxParams& params) noexcept;

/// Fails if there is no memory for the counters, and then writes nothing.
Status apply_penalties(const PenaltyParams& params) noexcept;

}  // namespace flashplan::cpu

/// Each of these functions is one launch on `stream`, unless its comment says otherwise.
namespace flashplan::cuda {

/// Tokens whose page id or slot lies outside the cache are not written. Two launches where k and v
/// differ in dtype.
Status append_paged_kv(const AppendParams& params, Device device, Stream stream) noexcept;
Status rope_append_paged_kv(const RopeAppendParams& params, Device device, Stream stream) noexcept;

/// Tokens whose slot lies outside of the cache are not written.
Status append_mla(const MlaAppendParams& params, Device device, Stream stream) noexcept;
/// Rows whose page id is outside of the cache become 0.
Status gather_mla(const MlaGatherParams& params, Device device, Stream stream) noexcept;

/// ln_base: the natural logarithm of the base of every lse, which is e or 2.
///   kUnsupported  there are more states than the kernel's argument can list, and they are not
///                 slices of one tensor
Status merge_states(const AttentionState* states, int32_t num_states, const AttentionState& out,
                    float ln_base, Stream stream) noexcept;

Status norm(const NormParams& params, Device device, Stream stream) noexcept;
Status gated_activation(const ActivationParams& params, Device device, Stream stream) noexcept;
/// Rows whose index is outside of x become 0.
Status gather_rows(const GatherParams& params, Device device, Stream stream) noexcept;
Status apply_rope(const RopeParams& params, Device device, Stream stream) noexcept;
/// Makes up to three launches.
Status quantize_fp8(const QuantizeParams& params, Device device, Stream stream) noexcept;
Status sample(const SampleParams& params, Device device, Stream stream) noexcept;
Status filter_rows(const FilterParams& params, Device device, Stream stream) noexcept;
Status list_logprobs(const FilterParams& params, Device device, Stream stream) noexcept;
Status speculative_verify(const VerifyParams& params, Device device, Stream stream) noexcept;
Status softmax(const SoftmaxParams& params, Device device, Stream stream) noexcept;
Status apply_penalties(const PenaltyParams& params, Device device, Stream stream) noexcept;

}  // namespace flashplan::cuda
