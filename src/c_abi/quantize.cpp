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

flashplan_rope_tensors default_rope_tensors() noexcept {
  flashplan_rope_tensors t = {};
  t.q_scale = t.k_scale = 1.0F;
  return t;
}

Status quantize(const flashplan_tensor* x, const flashplan_tensor* out,
                const flashplan_tensor* scale, int32_t source, float number,
                Stream stream) noexcept {
  TensorView x_view, out_view, scale_view;
  FLASHPLAN_RETURN_IF_ERROR(
      read_tensors({{"x", x, &x_view}, {"out", out, &out_view}, {"scale", scale, &scale_view}}));
  return quantize_fp8(x_view, out_view, scale_view, static_cast<ScaleSource>(source), number,
                      stream);
}

Status rotate(const flashplan_rope_tensors* given, const flashplan_rope* given_rope,
              Stream stream) noexcept {
  flashplan_rope_tensors t;
  FLASHPLAN_RETURN_IF_ERROR(read("tensors", given, default_rope_tensors(), &t));
  FLASHPLAN_RETURN_IF_ERROR(check_reserved("tensors", t.reserved));
  TensorView q, k, positions, table, out_q, out_k;
  RopeScales scales;
  scales.q_scale = t.q_scale;
  scales.k_scale = t.k_scale;
  FLASHPLAN_RETURN_IF_ERROR(read_tensors({{"q", t.q, &q},
                                          {"k", t.k, &k},
                                          {"positions", t.positions, &positions},
                                          {"cos_sin_cache", t.cos_sin_cache, &table},
                                          {"out_q", t.out_q, &out_q},
                                          {"out_k", t.out_k, &out_k},
                                          {"q_scale", t.q_scales, &scales.q_scales},
                                          {"k_scale", t.k_scales, &scales.k_scales}}));
  if (given_rope == nullptr) {
    return apply_rope(q, k, positions, table, t.interleaved != 0, out_q, out_k, stream, scales);
  }
  if (t.cos_sin_cache != nullptr) {
    return error(StatusCode::kInvalidArgument, "rope: expected NULL beside cos_sin_cache, got one");
  }
  Rope rope;
  FLASHPLAN_RETURN_IF_ERROR(read_rope(given_rope, &rope));
  return apply_rope(q, k, positions, rope, out_q, out_k, stream, scales);
}

}  // namespace
}  // namespace flashplan::c_abi

using namespace flashplan;

flashplan_status flashplan_quantize_fp8(const flashplan_tensor* x, const flashplan_tensor* out,
                                        const flashplan_tensor* scale, int32_t source, float number,
                                        flashplan_stream stream, char* message) noexcept {
  return c_abi::report(c_abi::quantize(x, out, scale, source, number, stream), message);
}

void flashplan_rope_tensors_init(flashplan_rope_tensors* tensors, size_t struct_size) noexcept {
  c_abi::write(c_abi::default_rope_tensors(), tensors, struct_size);
}

flashplan_status flashplan_apply_rope_scaled(const flashplan_rope_tensors* tensors,
                                             const flashplan_rope* rope, flashplan_stream stream,
                                             char* message) noexcept {
  return c_abi::report(c_abi::rotate(tensors, rope, stream), message);
}
