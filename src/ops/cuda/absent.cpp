// SPDX-License-Identifier: Apache-2.0
// The operators of a build without CUDA: tensors on a GPU are refused.
#include "common/error.h"
#include "ops/operators.h"

namespace flashplan::cuda {
namespace {

Status not_built() noexcept {
  return error(StatusCode::kUnsupported, "device: expected cpu (built without CUDA), got cuda");
}

}  // namespace

Status append_paged_kv(const AppendParams& /*params*/, Device /*device*/,
                       Stream /*stream*/) noexcept {
  return not_built();
}
Status rope_append_paged_kv(const RopeAppendParams& /*params*/, Device /*device*/,
                            Stream /*stream*/) noexcept {
  return not_built();
}
Status append_mla(const MlaAppendParams& /*params*/, Device /*device*/,
                  Stream /*stream*/) noexcept {
  return not_built();
}
Status gather_mla(const MlaGatherParams& /*params*/, Device /*device*/,
                  Stream /*stream*/) noexcept {
  return not_built();
}
Status merge_states(const AttentionState* /*states*/, int32_t /*num_states*/,
                    const AttentionState& /*out*/, float /*ln_base*/, Stream /*stream*/) noexcept {
  return not_built();
}
Status norm(const NormParams& /*params*/, Device /*device*/, Stream /*stream*/) noexcept {
  return not_built();
}
Status gated_activation(const ActivationParams& /*params*/, Device /*device*/,
                        Stream /*stream*/) noexcept {
  return not_built();
}
Status gather_rows(const GatherParams& /*params*/, Device /*device*/, Stream /*stream*/) noexcept {
  return not_built();
}
Status apply_rope(const RopeParams& /*params*/, Device /*device*/, Stream /*stream*/) noexcept {
  return not_built();
}
Status quantize_fp8(const QuantizeParams& /*params*/, Device /*device*/,
                    Stream /*stream*/) noexcept {
  return not_built();
}
Status sample(const SampleParams& /*params*/, Device /*device*/, Stream /*stream*/) noexcept {
  return not_built();
}
Status filter_rows(const FilterParams& /*params*/, Device /*device*/, Stream /*stream*/) noexcept {
  return not_built();
}
Status list_logprobs(const FilterParams& /*params*/, Device /*device*/,
                     Stream /*stream*/) noexcept {
  return not_built();
}
Status speculative_verify(const VerifyParams& /*params*/, Device /*device*/,
                          Stream /*stream*/) noexcept {
  return not_built();
}
Status apply_penalties(const PenaltyParams& /*params*/, Device /*device*/,
                       Stream /*stream*/) noexcept {
  return not_built();
}
Status softmax(const SoftmaxParams& /*params*/, Device /*device*/, Stream /*stream*/) noexcept {
  return not_built();
}

}  // namespace flashplan::cuda
