// SPDX-License-Identifier: Apache-2.0
#include "flashplan/sampling.h"

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

/// Checks which rows of the logits the requests draw from, if it is given.
Status check_rows_of_logits(const TensorArgument& rows, const TensorView& logits) {
  if (rows.view.empty()) return {};
  if (rows.view.dtype != DType::kInt64) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(rows, DType::kInt32, " or int64"));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_device(rows, logits.device));
  return check_shape(rows, {Dim::int32()});
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
  const RandomArguments random{{"seed", o.seeds}, {"offset", o.offsets}};
  FLASHPLAN_RETURN_IF_ERROR(check_random(random, logits.device, batch));
  FLASHPLAN_RETURN_IF_ERROR(check_filters(logits, o, batch));
  const FilterArguments filters(o);
  const TensorArgument arguments[] = {ids,
                                      logprobs,
                                      status,
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
  p.logprobs = static_cast<float*>(outputs.logprobs.data);
  p.status = static_cast<int32_t*>(outputs.status.data);
  if (logits.device.type == DeviceType::kCuda) return cuda::sample(p, logits.device, stream);
  return cpu::sample(p);
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
