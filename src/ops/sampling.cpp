// SPDX-License-Identifier: Apache-2.0
#include "flashplan/sampling.h"

#include <algorithm>

#include "ops/checks.h"
#include "ops/operators.h"
#include "ops/sampling_checks.h"

namespace flashplan {
namespace {

/// Checks the temperatures of softmax(), as far as the host can read them.
Status check_softmax_temperatures(float all, const TensorView& each) {
  if (each.empty()) return check_scale("temperature", all);
  if (each.device.type != DeviceType::kCpu) return {};
  return check_entries("temperature", each, check_scale);
}

/// Checks `rows`, the rows of the logits that requests draw from, if it is given.
Status check_rows_of_logits(const TensorArgument& rows, const TensorView& logits) {
  if (rows.view.empty()) return {};
  if (rows.view.dtype != DType::kInt64) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(rows, DType::kInt32, " or int64"));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_device(rows, logits.device));
  return check_shape(rows, {Dim::int32()});
}

/// Checks the lists of the likeliest tokens, if they are given.
Status check_top(const TensorArgument& ids, const TensorArgument& logprobs,
                 const TensorView& logits, int64_t batch) {
  if (ids.view.empty() && logprobs.view.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(ids, DType::kInt32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(ids, logits.device));
  const int64_t most = std::min<int64_t>(logits.shape[1], kMaxTopLogprobs);
  FLASHPLAN_RETURN_IF_ERROR(check_shape(ids, {Dim::exactly(batch), {1, most}}));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(logprobs, DType::kFloat32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(logprobs, logits.device));
  return check_shape(logprobs, {Dim::exactly(batch), Dim::exactly(ids.view.shape[1])});
}

/// The parameters for listing log-probabilities of tokens that sample() draws by `p`.
FilterParams make_lister(const SampleParams& p, const SampleOutputs& outputs) {
  FilterParams lister;
  static_cast<SampleParams&>(lister) = p;
  lister.logprobs = static_cast<float*>(outputs.logprobs.data);
  lister.status = nullptr;
  if (outputs.logprobs_of == LogprobsOf::kRaw) {
    lister.bias = nullptr;
    lister.joint = false;
    lister.temperature = {1.0F, nullptr};
    lister.top_k = {INT32_MAX, nullptr};
    lister.top_p = {1.0F, nullptr};
    lister.min_p = {0.0F, nullptr};
  }
  if (!outputs.top_ids.empty()) {
    const auto stride = [](const TensorView& view) {
      return view.shape[0] > 1 ? view.stride[0] : 0;
    };
    lister.num_top = static_cast<int32_t>(outputs.top_ids.shape[1]);
    lister.top_ids = static_cast<int32_t*>(outputs.top_ids.data);
    lister.top_logprobs = static_cast<float*>(outputs.top_logprobs.data);
    lister.top_id_stride = stride(outputs.top_ids);
    lister.top_logprob_stride = stride(outputs.top_logprobs);
  }
  return lister;
}

}  // namespace

Status sample(const TensorView& logits, const SampleOptions& options, const SampleOutputs& outputs,
              Stream stream) noexcept {
  const SampleOptions& o = options;
  const TensorArgument logits_arg{"logits", logits};
  const TensorArgument rows{"rows", o.rows};
  FLASHPLAN_RETURN_IF_ERROR(check_logits(logits_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_rows_of_logits(rows, logits));
  const int64_t batch = o.rows.empty() ? logits.shape[0] : o.rows.shape[0];
  const TensorArgument ids{"out", outputs.ids, true};
  const TensorArgument logprobs{"logprobs", outputs.logprobs, true};
  const TensorArgument status{"status", outputs.status, true};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(ids, DType::kInt32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(ids, logits.device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(ids, {Dim::exactly(batch)}));
  FLASHPLAN_RETURN_IF_ERROR(check_each(logprobs, DType::kFloat32, logits, batch));
  FLASHPLAN_RETURN_IF_ERROR(check_each(status, DType::kInt32, logits, batch));
  const TensorArgument top_ids{"top_ids", outputs.top_ids, true};
  const TensorArgument top_logprobs{"top_logprobs", outputs.top_logprobs, true};
  FLASHPLAN_RETURN_IF_ERROR(check_top(top_ids, top_logprobs, logits, batch));
  const RandomArguments random{{"seed", o.seeds}, {"offset", o.offsets}};
  FLASHPLAN_RETURN_IF_ERROR(check_random(random, logits.device, batch));
  FLASHPLAN_RETURN_IF_ERROR(check_filters(logits, o, batch));
  const FilterArguments filters(o);
  const TensorArgument arguments[] = {ids,
                                      logprobs,
                                      status,
                                      top_ids,
                                      top_logprobs,
                                      logits_arg,
                                      rows,
                                      random.seeds,
                                      random.offsets,
                                      filters.temperatures,
                                      filters.top_ks,
                                      filters.top_ps,
                                      filters.min_ps,
                                      filters.bias};
  FLASHPLAN_RETURN_IF_ERROR(check_apart(arguments));
  if (batch == 0) return {};

  SampleParams p;
  set_filters(logits, o, batch, &p);
  set_random(o.seed, o.offset, random, &p);
  p.rows = o.rows.data;
  p.has_wide_rows = o.rows.dtype == DType::kInt64;
  p.num_logit_rows = static_cast<int32_t>(logits.shape[0]);
  p.ids = static_cast<int32_t*>(outputs.ids.data);
  p.status = static_cast<int32_t*>(outputs.status.data);
  // Raw log-probabilities and the likeliest tokens are written by list_logprobs() after the draw.
  // It then also writes the log-probability of the token.
  const bool has_lister =
      !top_ids.view.empty() || (!logprobs.view.empty() && outputs.logprobs_of == LogprobsOf::kRaw);
  if (!has_lister) p.logprobs = static_cast<float*>(outputs.logprobs.data);
  if (logits.device.type == DeviceType::kCuda) {
    FLASHPLAN_RETURN_IF_ERROR(cuda::sample(p, logits.device, stream));
    if (!has_lister) return {};
    return cuda::list_logprobs(make_lister(p, outputs), logits.device, stream);
  }
  FLASHPLAN_RETURN_IF_ERROR(cpu::sample(p));
  if (has_lister) cpu::list_logprobs(make_lister(p, outputs));
  return {};
}

Status softmax(const TensorView& logits, float temperature, const TensorView& temperatures,
               const TensorView& out, Stream stream) noexcept {
  const TensorArgument logits_arg{"logits", logits};
  const TensorArgument temperatures_arg{"temperature", temperatures};
  const TensorArgument out_arg{"out", out, true};
  FLASHPLAN_RETURN_IF_ERROR(check_logits(logits_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_each(temperatures_arg, DType::kFloat32, logits, logits.shape[0]));
  FLASHPLAN_RETURN_IF_ERROR(check_softmax_temperatures(temperature, temperatures));
  if (out.dtype != DType::kFloat32) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(out_arg, logits.dtype, " (as logits) or float32"));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_rows_like(out_arg, logits, logits.shape[1]));
  if (out.dtype == logits.dtype) {
    FLASHPLAN_RETURN_IF_ERROR(check_apart_or_same(out_arg, logits_arg));
  } else {
    FLASHPLAN_RETURN_IF_ERROR(check_apart(out_arg, logits_arg));
  }
  if (!temperatures.empty()) FLASHPLAN_RETURN_IF_ERROR(check_apart(out_arg, temperatures_arg));
  if (logits.shape[0] == 0) return {};
  SoftmaxParams p;
  p.logits = static_cast<const char*>(logits.data);
  p.row_stride = stride_bytes(logits, 0);
  p.out = static_cast<char*>(out.data);
  p.out_stride = stride_bytes(out, 0);
  p.dtype = logits.dtype;
  p.out_dtype = out.dtype;
  p.num_rows = static_cast<int32_t>(logits.shape[0]);
  p.vocab = static_cast<int32_t>(logits.shape[1]);
  p.temperature = make_parameter(temperature, temperatures);
  if (logits.device.type == DeviceType::kCuda) return cuda::softmax(p, logits.device, stream);
  cpu::softmax(p);
  return {};
}

}  // namespace flashplan
