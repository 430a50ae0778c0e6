// SPDX-License-Identifier: Apache-2.0
#include "checks/tensor_checks.h"
#include "common/error.h"
#include "flashplan/penalties.h"
#include "ops/checks.h"
#include "ops/operators.h"

namespace flashplan {
namespace {

/// Checks a tensor that has one number for each request, unless the tensor is empty.
Status check_each(const TensorArgument& argument, const TensorView& logits) {
  if (argument.view.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, DType::kFloat32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(argument, logits.device));
  return check_shape(argument, {Dim::exactly(logits.shape[0])});
}

/// Checks the penalties of request `row` or, if `row` is -1, those that are one for all requests.
Status check_numbers(const PenaltyParams& p, int32_t row) {
  const Penalties penalties = p.penalties_of(row < 0 ? 0 : row);
  if (penalties.are_valid()) return {};
  const struct {
    const char* name;
    const Parameter<float>& parameter;
    bool above_zero;
  } all[] = {{"repetition", p.repetition, true},
             {"presence", p.presence, false},
             {"frequency", p.frequency, false}};
  for (const auto& [name, parameter, above_zero] : all) {
    const float value = parameter.of(row < 0 ? 0 : row);
    if (Penalties::is_finite(value) && (!above_zero || value > 0.0F)) continue;
    const char* expected = above_zero ? "a finite number > 0" : "a finite number";
    if (parameter.each == nullptr) {
      return error(StatusCode::kInvalidArgument, "%s: expected %s, got %g", name, expected,
                   double{value});
    }
    return error(StatusCode::kInvalidArgument, "%s[%d]: expected %s, got %g", name, row, expected,
                 double{value});
  }
  return {};
}

/// Checks the penalties, lengths and tokens of all requests, which are in host memory.
Status check_values(const PenaltyParams& p) {
  for (int32_t row = 0; row < p.num_rows; ++row) {
    FLASHPLAN_RETURN_IF_ERROR(check_numbers(p, row));
    const int32_t len = p.history_lens[row];
    if (len < 0 || len > p.max_len) {
      return error(StatusCode::kInvalidArgument, "history_lens[%d]: expected 0 to %d, got %d", row,
                   p.max_len, len);
    }
    for (int32_t i = 0; i < len; ++i) {
      const int64_t id = p.token(row, i);
      if (id >= 0 && id < p.vocab) continue;
      return error(StatusCode::kInvalidArgument,
                   "history[%d, %d]: expected a token in [0, %d), got %lld", row, i, p.vocab,
                   static_cast<long long>(id));
    }
  }
  return {};
}

/// Checks the penalties that are one for all requests. They are in host memory on every device.
Status check_common_numbers(PenaltyParams p) {
  for (Parameter<float>* parameter : {&p.repetition, &p.presence, &p.frequency}) {
    if (parameter->each != nullptr) *parameter = {1.0F, nullptr};
  }
  return check_numbers(p, -1);
}

}  // namespace

Status apply_penalties(const TensorView& logits, const TensorView& history,
                       const TensorView& history_lens, const PenaltyOptions& o,
                       Stream stream) noexcept {
  const TensorArgument logits_arg{"logits", logits, true};
  const TensorArgument history_arg{"history", history};
  const TensorArgument lens_arg{"history_lens", history_lens};
  const TensorArgument repetitions{"repetition", o.repetitions};
  const TensorArgument presences{"presence", o.presences};
  const TensorArgument frequencies{"frequency", o.frequencies};
  FLASHPLAN_RETURN_IF_ERROR(check_wide(logits_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(logits_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(logits_arg, {Dim::int32(), Dim::int32(1)}));
  const Dim batch = Dim::exactly(logits.shape[0]);
  if (history.dtype != DType::kInt64) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(history_arg, DType::kInt32, " or int64"));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_device(history_arg, logits.device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(history_arg, {batch, Dim::int32()}));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(lens_arg, DType::kInt32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(lens_arg, logits.device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(lens_arg, {batch}));
  for (const TensorArgument* each : {&repetitions, &presences, &frequencies}) {
    FLASHPLAN_RETURN_IF_ERROR(check_each(*each, logits));
  }
  const TensorArgument arguments[] = {logits_arg,  history_arg, lens_arg,
                                      repetitions, presences,   frequencies};
  FLASHPLAN_RETURN_IF_ERROR(check_apart(arguments));

  PenaltyParams p;
  p.repetition = {o.repetition, static_cast<const float*>(o.repetitions.data)};
  p.presence = {o.presence, static_cast<const float*>(o.presences.data)};
  p.frequency = {o.frequency, static_cast<const float*>(o.frequencies.data)};
  FLASHPLAN_RETURN_IF_ERROR(check_common_numbers(p));
  if (!has_elements(logits)) return {};
  p.logits = static_cast<char*>(logits.data);
  p.row_stride = stride_bytes(logits, 0);
  p.dtype = logits.dtype;
  p.num_rows = static_cast<int32_t>(logits.shape[0]);
  p.vocab = static_cast<int32_t>(logits.shape[1]);
  p.history = history.data;
  p.has_wide_history = history.dtype == DType::kInt64;
  p.history_stride = history.shape[0] > 1 ? history.stride[0] : 0;
  p.max_len = static_cast<int32_t>(history.shape[1]);
  p.history_lens = static_cast<const int32_t*>(history_lens.data);
  if (logits.device.type == DeviceType::kCuda) {
    return p.max_len == 0 ? Status() : cuda::apply_penalties(p, logits.device, stream);
  }
  FLASHPLAN_RETURN_IF_ERROR(check_values(p));
  return cpu::apply_penalties(p);
}

}  // namespace flashplan
