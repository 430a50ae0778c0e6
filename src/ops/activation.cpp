// SPDX-License-Identifier: Apache-2.0
#include "flashplan/activation.h"

#include "checks/tensor_checks.h"
#include "common/dtypes.h"
#include "common/error.h"
#include "ops/checks.h"
#include "ops/operators.h"

namespace flashplan {

Status gated_activation(Activation activation, const TensorView& x, const TensorView& out,
                        float scale, Stream stream, bool pdl) noexcept {
  const TensorArgument x_arg{"x", x};
  const TensorArgument out_arg{"out", out, true};
  if (activation < Activation::kSilu || activation > Activation::kGeluTanh) {
    return error(StatusCode::kInvalidArgument, "activation: expected 0 to 2, got %d",
                 static_cast<int>(activation));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_wide(x_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_rows(x_arg));
  const int64_t width = x.shape[x.rank - 1];
  if (width % 2 != 0) {
    return error(StatusCode::kInvalidArgument, "x: expected an even last dimension, got %lld",
                 static_cast<long long>(width));
  }
  if (out.dtype != x.dtype && !is_narrow_float(out.dtype)) {
    return error(StatusCode::kInvalidType,
                 "out: expected %s (as x), float8_e4m3fn or float8_e5m2, got %s",
                 to_string(x.dtype), to_string(out.dtype));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_rows_like(out_arg, x, width / 2));
  FLASHPLAN_RETURN_IF_ERROR(check_scale("scale", scale));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_arg, x_arg));
  if (!has_elements(x)) return {};
  ActivationParams params;
  params.x = make_rows(x);
  params.out = make_rows(out);
  params.activation = activation;
  params.dtype = x.dtype;
  params.out_dtype = out.dtype;
  params.num_rows = static_cast<int32_t>(num_rows(x));
  params.row_size = static_cast<int32_t>(width / 2);
  params.scale = scale;
  params.pdl = pdl;
  if (x.device.type == DeviceType::kCuda) return cuda::gated_activation(params, x.device, stream);
  cpu::gated_activation(params);
  return {};
}

}  // namespace flashplan
