// SPDX-License-Identifier: Apache-2.0
// The functions of flashplan_c_ops.h that make 8-bit queries and keys.
#include "c_abi/read_structs.h"
#include "c_abi/report.h"
#include "c_abi/structs.h"
#include "flashplan/flashplan.h"
#include "flashplan/flashplan_c_ops.h"

namespace flashplan::c_abi {
namespace {

static_assert(is_same(FLASHPLAN_SCALE_OF_VALUES, ScaleSource::kValues) &&
              is_same(FLASHPLAN_SCALE_OF_NUMBER, ScaleSource::kNumber) &&
              is_same(FLASHPLAN_SCALE_OF_TENSOR, ScaleSource::kTensor));

Status quantize(const flashplan_tensor* x, const flashplan_tensor* out,
                const flashplan_tensor* scale, int32_t source, float number,
                Stream stream) noexcept {
  TensorView x_view, out_view, scale_view;
  FLASHPLAN_RETURN_IF_ERROR(
      read_tensors({{"x", x, &x_view}, {"out", out, &out_view}, {"scale", scale, &scale_view}}));
  return quantize_fp8(x_view, out_view, scale_view, static_cast<ScaleSource>(source), number,
                      stream);
}

}  // namespace
}  // namespace flashplan::c_abi

using namespace flashplan;

flashplan_status flashplan_quantize_fp8(const flashplan_tensor* x, const flashplan_tensor* out,
                                        const flashplan_tensor* scale, int32_t source, float number,
                                        flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::quantize(x, out, scale, source, number, stream), message);
}
