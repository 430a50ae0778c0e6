// SPDX-License-Identifier: Apache-2.0
#include "flashplan/speculative.h"

#include "checks/tensor_checks.h"
#include "common/error.h"
#include "ops/checks.h"
#include "ops/operators.h"
#include "ops/sampling_checks.h"

namespace flashplan {
namespace {

/// Checks shapes, dtypes and devices of the drafts.
Status check_drafts(const Drafts& d) {
  const TensorArgument target{"target_probs", d.target_probs};
  const TensorArgument draft{"draft_probs", d.draft_probs};
  const TensorArgument tokens{"draft_tokens", d.tokens};
  const TensorArgument parents{"draft_parents", d.parents};
  FLASHPLAN_RETURN_IF_ERROR(check_wide(target));
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(target));
  FLASHPLAN_RETURN_IF_ERROR(
      check_shape(target, {Dim::int32(), {1, kMaxDrafts + 1}, Dim::int32(1)}));
  const Device device = d.target_probs.device;
  const Dim batch = Dim::exactly(d.target_probs.shape[0]);
  const Dim drafts = Dim::exactly(d.target_probs.shape[1] - 1);
  if (!d.draft_probs.empty()) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(draft, d.target_probs.dtype, " (as target_probs)"));
    FLASHPLAN_RETURN_IF_ERROR(check_device(draft, device));
    FLASHPLAN_RETURN_IF_ERROR(
        check_shape(draft, {batch, drafts, Dim::exactly(d.target_probs.shape[2])}));
  }
  if (d.tokens.dtype != DType::kInt64) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(tokens, DType::kInt32, " or int64"));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_device(tokens, device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(tokens, {batch, drafts}));
  if (d.parents.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(parents, DType::kInt32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(parents, device));
  return d.parents.rank == 1 ? check_shape(parents, {drafts})
                             : check_shape(parents, {batch, drafts});
}

/// Checks an output with one number, or several, for each request.
Status check_output(const TensorArgument& argument, std::initializer_list<Dim> shape, DType dtype,
                    Device device) {
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, dtype, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(argument, device));
  return check_shape(argument, shape);
}

/// Checks tokens and parents, which are in host memory.
Status check_nodes(const VerifyParams& p) {
  for (int32_t row = 0; row < p.num_rows; ++row) {
    for (int32_t draft = 0; draft < p.num_drafts; ++draft) {
      if (!p.is_wrong(row, draft)) continue;
      const auto id = static_cast<long long>(p.token(row, draft));
      if (id < -1 || id >= p.vocab) {
        return error(StatusCode::kInvalidArgument,
                     "draft_tokens[%d, %d]: expected -1 or a token below %d, got %lld", row, draft,
                     p.vocab, id);
      }
      return error(StatusCode::kInvalidArgument,
                   "draft_parents[%d]: expected -1 or a draft before it, got %d (request %d)",
                   draft, p.parent(row, draft), row);
    }
  }
  return {};
}

int64_t stride_of(const TensorView& view, int dimension) {
  return view.shape[dimension] > 1 ? view.stride[dimension] : 0;
}

VerifyParams make_params(const Drafts& d, const VerifyOptions& o, const VerifyOutputs& out) {
  VerifyParams p;
  p.tokens = d.tokens.data;
  p.token_stride = stride_of(d.tokens, 0);
  p.has_wide_tokens = d.tokens.dtype == DType::kInt64;
  p.parents = static_cast<const int32_t*>(d.parents.data);
  p.parent_stride = d.parents.rank == 2 ? stride_of(d.parents, 0) : 0;
  if (!d.draft_probs.empty() && has_elements(d.draft_probs)) {
    p.draft_probs = static_cast<const char*>(d.draft_probs.data);
    p.draft_request_stride = stride_bytes(d.draft_probs, 0);
    p.draft_row_stride = stride_bytes(d.draft_probs, 1);
  }
  p.target_probs = static_cast<const char*>(d.target_probs.data);
  p.target_request_stride = stride_bytes(d.target_probs, 0);
  p.target_row_stride = stride_bytes(d.target_probs, 1);
  p.dtype = d.target_probs.dtype;
  p.num_rows = static_cast<int32_t>(d.target_probs.shape[0]);
  p.num_drafts = static_cast<int32_t>(d.target_probs.shape[1]) - 1;
  p.vocab = static_cast<int32_t>(d.target_probs.shape[2]);
  set_random(o.seed, o.offset, {{"seed", o.seeds}, {"offset", o.offsets}}, &p);
  p.out = static_cast<int32_t*>(out.tokens.data);
  p.out_stride = stride_of(out.tokens, 0);
  p.num_accepted = static_cast<int32_t*>(out.num_accepted.data);
  if (!out.nodes.empty() && p.num_drafts > 0) {
    p.nodes = static_cast<int32_t*>(out.nodes.data);
    p.node_stride = stride_of(out.nodes, 0);
  }
  p.status = static_cast<int32_t*>(out.status.data);
  return p;
}

}  // namespace

Status speculative_verify(const Drafts& d, const VerifyOptions& o, const VerifyOutputs& out,
                          Stream stream) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_drafts(d));
  const Device device = d.target_probs.device;
  const Dim batch = Dim::exactly(d.target_probs.shape[0]);
  const int64_t drafts = d.target_probs.shape[1] - 1;
  const TensorArgument tokens{"out", out.tokens, true};
  const TensorArgument num_accepted{"num_accepted", out.num_accepted, true};
  const TensorArgument nodes{"nodes", out.nodes, true};
  const TensorArgument status{"status", out.status, true};
  const RandomArguments random{{"seed", o.seeds}, {"offset", o.offsets}};
  constexpr DType kInt = DType::kInt32;
  FLASHPLAN_RETURN_IF_ERROR(check_output(tokens, {batch, Dim::exactly(drafts + 1)}, kInt, device));
  FLASHPLAN_RETURN_IF_ERROR(check_output(num_accepted, {batch}, kInt, device));
  if (!out.nodes.empty()) {
    FLASHPLAN_RETURN_IF_ERROR(check_output(nodes, {batch, Dim::exactly(drafts)}, kInt, device));
  }
  if (!out.status.empty()) {
    FLASHPLAN_RETURN_IF_ERROR(check_output(status, {batch}, kInt, device));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_random(random, device, d.target_probs.shape[0]));
  const TensorArgument arguments[] = {tokens,
                                      num_accepted,
                                      nodes,
                                      status,
                                      {"draft_tokens", d.tokens},
                                      {"draft_parents", d.parents},
                                      {"draft_probs", d.draft_probs},
                                      {"target_probs", d.target_probs},
                                      random.seeds,
                                      random.offsets};
  FLASHPLAN_RETURN_IF_ERROR(check_apart(arguments));
  if (d.target_probs.shape[0] == 0) return {};
  const VerifyParams p = make_params(d, o, out);
  if (device.type == DeviceType::kCuda) return cuda::speculative_verify(p, device, stream);
  FLASHPLAN_RETURN_IF_ERROR(check_nodes(p));
  return cpu::speculative_verify(p);
}

}  // namespace flashplan
