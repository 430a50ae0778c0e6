// SPDX-License-Identifier: Apache-2.0
#include "flashplan/sampling.h"

#include <cmath>

#include "checks/tensor_checks.h"
#include "common/error.h"
#include "ops/checks.h"
#include "ops/operators.h"

namespace flashplan {
namespace {

/// Checks logits: [batch, vocab >= 1].
Status check_logits(const TensorArgument& logits) {
  FLASHPLAN_RETURN_IF_ERROR(check_wide(logits));
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(logits));
  return check_shape(logits, {Dim::int32(), Dim::int32(1)});
}

/// Checks a parameter or an output that has one number for each request, if it is given.
Status check_each(const TensorArgument& argument, DType dtype, const TensorView& logits) {
  if (argument.view.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, dtype, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(argument, logits.device));
  return check_shape(argument, {Dim::exactly(logits.shape[0])});
}

template <class Number>
Parameter<Number> make_parameter(Number all, const TensorView& each) {
  return {all, static_cast<const Number*>(each.data)};
}

Status check_number(const char* name, bool fits, const char* expected, double got) {
  if (fits) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected %s, got %.9g", name, expected, got);
}

/// Checks the numbers that apply to all requests.
Status check_numbers(const SampleOptions& o) {
  if (o.temperatures.empty()) {
    FLASHPLAN_RETURN_IF_ERROR(check_not_negative("temperature", o.temperature));
  }
  if (o.top_ks.empty())
    FLASHPLAN_RETURN_IF_ERROR(check_number("top_k", o.top_k >= 1, ">= 1", o.top_k));
  if (o.top_ps.empty()) {
    FLASHPLAN_RETURN_IF_ERROR(check_number("top_p", o.top_p > 0.0F && o.top_p <= 1.0F,
                                           "a number in (0, 1]", double{o.top_p}));
  }
  if (!o.min_ps.empty()) return {};
  return check_number("min_p", o.min_p >= 0.0F && o.min_p <= 1.0F, "a number in [0, 1]",
                      double{o.min_p});
}

/// Checks the temperatures of softmax(), as far as the host can read them.
Status check_softmax_temperatures(float all, const TensorView& each) {
  if (each.empty()) return check_scale("temperature", all);
  if (each.device.type != DeviceType::kCpu) return {};
  return check_entries("temperature", each, check_scale);
}

Status check_bias(const TensorArgument& bias, const TensorView& logits) {
  if (bias.view.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(bias, DType::kFloat32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(bias, logits.device));
  const Dim vocab = Dim::exactly(logits.shape[1]);
  if (bias.view.rank == 1) return check_shape(bias, {vocab});
  return check_shape(bias, {Dim::exactly(logits.shape[0]), vocab});
}

}  // namespace

Status sample(const TensorView& logits, const SampleOptions& options, const SampleOutputs& outputs,
              Stream stream) noexcept {
  const SampleOptions& o = options;
  const TensorArgument logits_arg{"logits", logits};
  FLASHPLAN_RETURN_IF_ERROR(check_logits(logits_arg));
  const TensorArgument ids{"out", outputs.ids, true};
  const TensorArgument logprobs{"logprobs", outputs.logprobs, true};
  const TensorArgument status{"status", outputs.status, true};
  const TensorArgument bias{"logit_bias", o.logit_bias};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(ids, DType::kInt32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(ids, logits.device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(ids, {Dim::exactly(logits.shape[0])}));
  FLASHPLAN_RETURN_IF_ERROR(check_each(logprobs, DType::kFloat32, logits));
  FLASHPLAN_RETURN_IF_ERROR(check_each(status, DType::kInt32, logits));
  const TensorArgument temperatures{"temperature", o.temperatures};
  const TensorArgument top_ks{"top_k", o.top_ks};
  const TensorArgument top_ps{"top_p", o.top_ps};
  const TensorArgument min_ps{"min_p", o.min_ps};
  const TensorArgument seeds{"seed", o.seeds};
  const TensorArgument offsets{"offset", o.offsets};
  for (const TensorArgument* each : {&temperatures, &top_ps, &min_ps}) {
    FLASHPLAN_RETURN_IF_ERROR(check_each(*each, DType::kFloat32, logits));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_each(top_ks, DType::kInt32, logits));
  FLASHPLAN_RETURN_IF_ERROR(check_each(seeds, DType::kInt64, logits));
  FLASHPLAN_RETURN_IF_ERROR(check_each(offsets, DType::kInt64, logits));
  FLASHPLAN_RETURN_IF_ERROR(check_numbers(o));
  FLASHPLAN_RETURN_IF_ERROR(check_bias(bias, logits));
  if (o.from_probs && !o.logit_bias.empty()) {
    return error(StatusCode::kInvalidArgument,
                 "logit_bias: expected none with from_probs, got a tensor");
  }
  if (o.from_probs &&
      (!o.temperatures.empty() || (o.temperature != 0.0F && o.temperature != 1.0F))) {
    return error(StatusCode::kInvalidArgument,
                 "temperature: expected none, 0 or 1 with from_probs, got %s",
                 o.temperatures.empty() ? "another number" : "a tensor");
  }
  const TensorArgument arguments[] = {ids,    logprobs, status, logits_arg, temperatures, top_ks,
                                      top_ps, min_ps,   seeds,  offsets,    bias};
  FLASHPLAN_RETURN_IF_ERROR(check_apart(arguments));
  if (logits.shape[0] == 0) return {};

  SampleParams p;
  p.logits = static_cast<const char*>(logits.data);
  p.row_stride = stride_bytes(logits, 0);
  p.bias = static_cast<const float*>(o.logit_bias.data);
  p.bias_stride = o.logit_bias.rank == 2 ? o.logit_bias.stride[0] : 0;
  p.dtype = logits.dtype;
  p.num_rows = static_cast<int32_t>(logits.shape[0]);
  p.vocab = static_cast<int32_t>(logits.shape[1]);
  p.from_probs = o.from_probs;
  p.temperature = make_parameter(o.temperature, o.temperatures);
  p.top_k = make_parameter(o.top_k, o.top_ks);
  p.top_p = make_parameter(o.top_p, o.top_ps);
  p.min_p = make_parameter(o.min_p, o.min_ps);
  p.seed = make_parameter(o.seed, o.seeds);
  p.offset = make_parameter(o.offset, o.offsets);
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
  FLASHPLAN_RETURN_IF_ERROR(check_each(temperatures_arg, DType::kFloat32, logits));
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
