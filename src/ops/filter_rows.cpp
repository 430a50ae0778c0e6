// SPDX-License-Identifier: Apache-2.0
// The operators that write what filters keep of each row.
#include "common/error.h"
#include "flashplan/sampling.h"
#include "ops/checks.h"
#include "ops/operators.h"
#include "ops/rows.h"
#include "ops/sampling_checks.h"

namespace flashplan {
namespace {

/// Checks an output that has logits' shape, and may be the logits.
Status check_out(const TensorArgument& out, DType dtype, const TensorArgument& logits) {
  const char* why = dtype == logits.view.dtype ? " (as logits)" : "";
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(out, dtype, why));
  FLASHPLAN_RETURN_IF_ERROR(check_rows_like(out, logits.view, logits.view.shape[1]));
  return dtype == logits.view.dtype ? check_apart_or_same(out, logits) : check_apart(out, logits);
}

Status filter_rows(const TensorView& logits, const SampleOptions& options, const TensorView& out,
                   bool is_mask, const TensorView& status, Stream stream) noexcept {
  FilterParams p;
  set_filters(logits, options, logits.shape[0], &p);
  p.out = static_cast<char*>(out.data);
  p.out_stride = stride_bytes(out, 0);
  p.is_mask = is_mask;
  p.status = static_cast<int32_t*>(status.data);
  if (logits.device.type == DeviceType::kCuda) return cuda::filter_rows(p, logits.device, stream);
  return cpu::filter_rows(p);
}

}  // namespace

Status filtered_probs(const TensorView& logits, const SampleOptions& options, const TensorView& out,
                      const TensorView& status, Stream stream) noexcept {
  const TensorArgument logits_arg{"logits", logits};
  const TensorArgument out_arg{"out", out, true};
  const TensorArgument status_arg{"status", status, true};
  FLASHPLAN_RETURN_IF_ERROR(check_logits(logits_arg));
  const int64_t batch = logits.shape[0];
  if (!options.rows.empty()) {
    return error(StatusCode::kInvalidArgument, "rows: expected none, got a tensor");
  }
  FLASHPLAN_RETURN_IF_ERROR(check_filters(logits, options, batch));
  FLASHPLAN_RETURN_IF_ERROR(check_out(out_arg, DType::kFloat32, logits_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_each(status_arg, DType::kInt32, logits, batch));
  const FilterArguments filters(options);
  const TensorArgument beside[] = {out_arg,        status_arg,     filters.temperatures,
                                   filters.top_ks, filters.top_ps, filters.min_ps,
                                   filters.bias};
  FLASHPLAN_RETURN_IF_ERROR(check_apart(beside));
  if (!status.empty()) FLASHPLAN_RETURN_IF_ERROR(check_apart(status_arg, logits_arg));
  if (batch == 0) return {};
  return filter_rows(logits, options, out, false, status, stream);
}

Status top_k_mask(const TensorView& logits, int32_t top_k, const TensorView& top_ks,
                  const TensorView& out, Stream stream) noexcept {
  const TensorArgument logits_arg{"logits", logits};
  const TensorArgument out_arg{"out", out, true};
  SampleOptions options;
  options.top_k = top_k;
  options.top_ks = top_ks;
  FLASHPLAN_RETURN_IF_ERROR(check_logits(logits_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_filters(logits, options, logits.shape[0]));
  FLASHPLAN_RETURN_IF_ERROR(check_out(out_arg, logits.dtype, logits_arg));
  if (!top_ks.empty()) FLASHPLAN_RETURN_IF_ERROR(check_apart(out_arg, {"top_k", top_ks}));
  if (logits.shape[0] == 0) return {};
  return filter_rows(logits, options, out, true, {}, stream);
}

}  // namespace flashplan
