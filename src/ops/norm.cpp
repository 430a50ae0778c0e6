// SPDX-License-Identifier: Apache-2.0
#include "flashplan/norm.h"

#include <initializer_list>

#include "checks/tensor_checks.h"
#include "common/dtypes.h"
#include "common/error.h"
#include "ops/checks.h"
#include "ops/operators.h"

namespace flashplan {
namespace {

/// Checks device and shape of weight or bias.
Status check_vector(const TensorArgument& vector, const TensorView& x) {
  FLASHPLAN_RETURN_IF_ERROR(check_device(vector, x.device));
  return check_shape(vector, {Dim::exactly(x.shape[x.rank - 1])});
}

Status check_weight(const TensorArgument& weight, const TensorView& x) {
  if (weight.view.empty()) return {};
  if (weight.view.dtype != DType::kFloat32) {
    const bool is_wide = x.dtype == DType::kFloat32;
    FLASHPLAN_RETURN_IF_ERROR(
        check_dtype(weight, x.dtype, is_wide ? " (as x)" : " (as x) or float32"));
  }
  return check_vector(weight, x);
}

Status check_bias(const TensorArgument& bias, const TensorView& weight, const TensorView& x) {
  if (bias.view.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(weight.empty() ? check_dtype(bias, x.dtype, " (as x)")
                                           : check_dtype(bias, weight.dtype, " (as weight)"));
  return check_vector(bias, x);
}

Status check_like_x(const TensorArgument& argument, const TensorView& x) {
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(argument, x.dtype, " (as x)"));
  return check_rows_like(argument, x, x.shape[x.rank - 1]);
}

/// Checks where the result goes, and what divides it. `out` may be x, and nothing else.
Status check_out(const TensorArgument& out, const TensorArgument& x, const OutScale& out_scale,
                 std::initializer_list<TensorArgument> others) {
  const DType dtype = out.view.dtype;
  if (dtype != x.view.dtype && !is_narrow_float(dtype)) {
    return error(StatusCode::kInvalidType,
                 "out: expected %s (as x), float8_e4m3fn or float8_e5m2, got %s",
                 to_string(x.view.dtype), to_string(dtype));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_rows_like(out, x.view, x.view.shape[x.view.rank - 1]));
  FLASHPLAN_RETURN_IF_ERROR(check_scale("scale", out_scale.scale));
  const TensorArgument scales{"scale", out_scale.scales};
  FLASHPLAN_RETURN_IF_ERROR(check_head_scales(scales, 1, x.view.device));
  if (x.view.device.type == DeviceType::kCpu) {
    FLASHPLAN_RETURN_IF_ERROR(check_scales("scale", out_scale.scale, out_scale.scales));
  }
  FLASHPLAN_RETURN_IF_ERROR(dtype == x.view.dtype ? check_apart_or_same(out, x)
                                                  : check_apart(out, x));
  for (const TensorArgument& other : others) FLASHPLAN_RETURN_IF_ERROR(check_apart(out, other));
  return check_apart(out, scales);
}

NormParams make_params(const TensorView& x, const TensorView& weight, const TensorView& out,
                       float eps, const OutScale& out_scale) {
  NormParams p;
  p.x = make_rows(x);
  p.out = make_rows(out);
  p.weight = weight.empty() ? nullptr : weight.data;
  p.dtype = x.dtype;
  p.weight_dtype = weight.empty() ? x.dtype : weight.dtype;
  p.out_dtype = out.dtype;
  p.scale = out_scale.scale;
  p.scales = head_scales(out_scale.scales).data;
  p.num_rows = static_cast<int32_t>(num_rows(x));
  p.row_size = static_cast<int32_t>(x.shape[x.rank - 1]);
  p.eps = eps;
  return p;
}

Status run(const NormParams& params, Device device, Stream stream) {
  if (device.type == DeviceType::kCuda) return cuda::norm(params, device, stream);
  cpu::norm(params);
  return {};
}

}  // namespace

Status rmsnorm(const TensorView& x, const TensorView& weight, const TensorView& out,
               const RmsNormOptions& options, Stream stream) noexcept {
  const TensorArgument x_arg{"x", x};
  const TensorArgument weight_arg{"weight", weight};
  const TensorArgument out_arg{"out", out, true};
  FLASHPLAN_RETURN_IF_ERROR(check_wide(x_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_rows(x_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_weight(weight_arg, x));
  FLASHPLAN_RETURN_IF_ERROR(check_not_negative("eps", options.eps));
  FLASHPLAN_RETURN_IF_ERROR(check_out(out_arg, x_arg, options.out_scale, {weight_arg}));
  if (!has_elements(x)) return {};
  NormParams params = make_params(x, weight, out, options.eps, options.out_scale);
  params.weight_offset = options.gemma ? 1.0F : 0.0F;
  params.pdl = options.pdl;
  return run(params, x.device, stream);
}

Status add_rmsnorm(const TensorView& x, const TensorView& residual, const TensorView& weight,
                   const TensorView& out, const RmsNormOptions& options, Stream stream) noexcept {
  const TensorArgument x_arg{"x", x, x.dtype == out.dtype && is_same_view(x, out)};
  const TensorArgument residual_arg{"residual", residual, true};
  const TensorArgument weight_arg{"weight", weight};
  const TensorArgument out_arg{"out", out, true};
  FLASHPLAN_RETURN_IF_ERROR(check_wide(x_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_rows(x_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_like_x(residual_arg, x));
  FLASHPLAN_RETURN_IF_ERROR(check_weight(weight_arg, x));
  FLASHPLAN_RETURN_IF_ERROR(check_not_negative("eps", options.eps));
  const TensorArgument arguments[] = {x_arg, residual_arg, weight_arg};
  FLASHPLAN_RETURN_IF_ERROR(check_apart(arguments));
  FLASHPLAN_RETURN_IF_ERROR(
      check_out(out_arg, x_arg, options.out_scale, {residual_arg, weight_arg}));
  if (!has_elements(x)) return {};
  NormParams params = make_params(x, weight, out, options.eps, options.out_scale);
  params.residual = make_rows(residual);
  params.weight_offset = options.gemma ? 1.0F : 0.0F;
  params.pdl = options.pdl;
  return run(params, x.device, stream);
}

Status add_rmsnorm(const TensorView& x, const TensorView& residual, const TensorView& weight,
                   const RmsNormOptions& options, Stream stream) noexcept {
  return add_rmsnorm(x, residual, weight, x, options, stream);
}

Status layernorm(const TensorView& x, const TensorView& weight, const TensorView& bias,
                 const TensorView& out, const LayerNormOptions& options, Stream stream) noexcept {
  const TensorArgument x_arg{"x", x};
  const TensorArgument weight_arg{"weight", weight};
  const TensorArgument bias_arg{"bias", bias};
  const TensorArgument out_arg{"out", out, true};
  FLASHPLAN_RETURN_IF_ERROR(check_wide(x_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_rows(x_arg));
  FLASHPLAN_RETURN_IF_ERROR(check_weight(weight_arg, x));
  FLASHPLAN_RETURN_IF_ERROR(check_bias(bias_arg, weight, x));
  FLASHPLAN_RETURN_IF_ERROR(check_not_negative("eps", options.eps));
  FLASHPLAN_RETURN_IF_ERROR(check_out(out_arg, x_arg, options.out_scale, {weight_arg, bias_arg}));
  if (!has_elements(x)) return {};
  NormParams params = make_params(x, weight, out, options.eps, options.out_scale);
  params.bias = bias.empty() ? nullptr : bias.data;
  params.centered = true;
  return run(params, x.device, stream);
}

}  // namespace flashplan
