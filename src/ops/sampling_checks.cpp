// SPDX-License-Identifier: Apache-2.0
#include "ops/sampling_checks.h"

#include "common/error.h"
#include "ops/checks.h"
#include "ops/rows.h"

namespace flashplan {
namespace {

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

Status check_bias(const TensorArgument& bias, const TensorView& logits) {
  if (bias.view.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(bias, DType::kFloat32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(bias, logits.device));
  const Dim vocab = Dim::exactly(logits.shape[1]);
  if (bias.view.rank == 1) return check_shape(bias, {vocab});
  return check_shape(bias, {Dim::exactly(logits.shape[0]), vocab});
}

/// With from_probs: checks that there is no bias, and no temperature but 0 or 1.
Status check_probabilities(const SampleOptions& o) {
  if (!o.from_probs) return {};
  if (!o.logit_bias.empty()) {
    return error(StatusCode::kInvalidArgument,
                 "logit_bias: expected none with from_probs, got a tensor");
  }
  if (o.temperatures.empty() && (o.temperature == 0.0F || o.temperature == 1.0F)) return {};
  return error(StatusCode::kInvalidArgument,
               "temperature: expected none, 0 or 1 with from_probs, got %s",
               o.temperatures.empty() ? "another number" : "a tensor");
}

}  // namespace

Status check_logits(const TensorArgument& logits) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_wide(logits));
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(logits));
  return check_shape(logits, {Dim::int32(), Dim::int32(1)});
}

Status check_each(const TensorArgument& argument, DType dtype, const TensorView& logits,
                  int64_t batch) noexcept {
  if (argument.view.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, dtype, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(argument, logits.device));
  return check_shape(argument, {Dim::exactly(batch)});
}

Status check_filters(const TensorView& logits, const SampleOptions& o, int64_t batch) noexcept {
  const FilterArguments arguments(o);
  for (const TensorArgument* each :
       {&arguments.temperatures, &arguments.top_ps, &arguments.min_ps}) {
    FLASHPLAN_RETURN_IF_ERROR(check_each(*each, DType::kFloat32, logits, batch));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_each(arguments.top_ks, DType::kInt32, logits, batch));
  FLASHPLAN_RETURN_IF_ERROR(check_numbers(o));
  FLASHPLAN_RETURN_IF_ERROR(check_bias(arguments.bias, logits));
  return check_probabilities(o);
}

Status check_random(const RandomArguments& random, Device device, int64_t batch) noexcept {
  for (const TensorArgument* each : {&random.seeds, &random.offsets}) {
    if (each->view.empty()) continue;
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(*each, DType::kInt64, ""));
    FLASHPLAN_RETURN_IF_ERROR(check_device(*each, device));
    const bool has_one = each->view.rank == 1 && each->view.shape[0] == 1;
    FLASHPLAN_RETURN_IF_ERROR(check_shape(*each, {Dim::exactly(has_one ? 1 : batch)}));
  }
  return {};
}

void set_random(int64_t seed, int64_t offset, const RandomArguments& random,
                RandomParams* params) noexcept {
  params->seed = make_parameter(seed, random.seeds.view);
  params->offset = make_parameter(offset, random.offsets.view);
  params->has_one_seed = !random.seeds.view.empty() && random.seeds.view.shape[0] == 1;
  params->has_one_offset = !random.offsets.view.empty() && random.offsets.view.shape[0] == 1;
}

void set_filters(const TensorView& logits, const SampleOptions& o, int64_t batch,
                 SampleParams* params) noexcept {
  SampleParams& p = *params;
  p.logits = static_cast<const char*>(logits.data);
  p.row_stride = stride_bytes(logits, 0);
  p.bias = static_cast<const float*>(o.logit_bias.data);
  p.bias_stride = o.logit_bias.rank == 2 ? o.logit_bias.stride[0] : 0;
  p.dtype = logits.dtype;
  p.num_rows = static_cast<int32_t>(batch);
  p.vocab = static_cast<int32_t>(logits.shape[1]);
  p.from_probs = o.from_probs;
  p.temperature = make_parameter(o.temperature, o.temperatures);
  p.top_k = make_parameter(o.top_k, o.top_ks);
  p.top_p = make_parameter(o.top_p, o.top_ps);
  p.min_p = make_parameter(o.min_p, o.min_ps);
  // Without top-p, or with top-p alone, the order of filters makes no difference, nor does `joint`.
  const bool has_top_p = !o.top_ps.empty() || o.top_p < 1.0F;
  const bool has_others =
      !o.top_ks.empty() || o.top_k < p.vocab || !o.min_ps.empty() || o.min_p > 0.0F;
  p.joint = o.joint && has_top_p && has_others;
}

}  // namespace flashplan
