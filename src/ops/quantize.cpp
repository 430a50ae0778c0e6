// SPDX-License-Identifier: Apache-2.0
#include "flashplan/quantize.h"

#include "checks/tensor_checks.h"
#include "common/dtypes.h"
#include "common/error.h"
#include "ops/checks.h"
#include "ops/operators.h"
#include "ops/rope_checks.h"

namespace flashplan {
namespace {

Status check_quantize(const TensorView& x, const TensorView& out, const TensorView& scale,
                      ScaleSource source, float number) {
  const TensorArgument x_arg{"x", x};
  const TensorArgument out_arg{"out", out, true};
  const TensorArgument scale_arg{"scale", scale, source != ScaleSource::kTensor};
  if (source < ScaleSource::kValues || source > ScaleSource::kTensor) {
    return error(StatusCode::kInvalidArgument, "source: expected 0 to 2, got %d",
                 static_cast<int>(source));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_wide(x_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(x_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(x_arg, {Dim::int32(), Dim::int32(), Dim::int32()}));
  if (!is_narrow_float(out.dtype)) {
    return error(StatusCode::kInvalidType, "out: expected float8_e4m3fn or float8_e5m2, got %s",
                 to_string(out.dtype));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_rows_like(out_arg, x, x.shape[2]));
  if (scale.empty()) {
    return error(StatusCode::kInvalidArgument, "scale: expected a tensor, got none");
  }
  FLASHPLAN_RETURN_IF_ERROR(check_head_scales(scale_arg, x.shape[1], x.device));
  if (source == ScaleSource::kNumber) FLASHPLAN_RETURN_IF_ERROR(check_scale("scale", number));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_arg, x_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_arg, scale_arg));
  return scale_arg.written ? check_apart(scale_arg, x_arg) : Status();
}

}  // namespace

Status quantize_fp8(const TensorView& x, const TensorView& out, const TensorView& scale,
                    ScaleSource source, float number, Stream stream) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_quantize(x, out, scale, source, number));
  QuantizeParams params;
  params.heads = make_rope_side(x, out);
  params.scale = static_cast<float*>(scale.data);
  params.num_scales = static_cast<int32_t>(scale.shape[0]);
  params.source = source;
  params.number = number;
  params.dtype = x.dtype;
  params.out_dtype = out.dtype;
  params.num_rows = has_elements(x) ? static_cast<int32_t>(x.shape[0]) : 0;
  params.head_dim = static_cast<int32_t>(x.shape[2]);
  if (params.num_scales == 0) return {};
  if (x.device.type == DeviceType::kCuda) return cuda::quantize_fp8(params, x.device, stream);
  if (source == ScaleSource::kTensor) {
    FLASHPLAN_RETURN_IF_ERROR(check_scales("scale", 1.0F, scale));
  }
  cpu::quantize_fp8(params);
  return {};
}

}  // namespace flashplan
