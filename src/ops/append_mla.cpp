// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checks/tensor_checks.h"
#include "common/dtypes.h"
#include "common/error.h"
#include "ops/checks.h"
#include "ops/mla_checks.h"
#include "ops/operators.h"
#include "ops/rope_checks.h"

namespace flashplan {
namespace {

Status check_tokens(const MlaAppendTensors& t, Device device) {
  const TensorArgument kv_c{"kv_c", t.kv_c};
  const TensorArgument k_pe{"k_pe", t.k_pe};
  FLASHPLAN_RETURN_IF_ERROR(check_wide(kv_c));
  FLASHPLAN_RETURN_IF_ERROR(check_device(kv_c, device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(kv_c, {Dim::any(), {1, kMaxLatentDim}}));
  if (t.k_pe.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(k_pe, t.kv_c.dtype, " (as kv_c)"));
  FLASHPLAN_RETURN_IF_ERROR(check_device(k_pe, device));
  return check_shape(k_pe, {Dim::any(), {1, kMaxLatentDim}});
}

Status check_stored(const MlaAppendTensors& t) {
  const DType stored = t.cache.latent.dtype;
  if (stored == DType::kFp8DsMla) {
    FLASHPLAN_RETURN_IF_ERROR(
        check_dtype({"kv_c", t.kv_c}, DType::kBFloat16, " (for an fp8_ds_mla cache)"));
    if (t.scale == 1.0F) return {};
    return error(StatusCode::kInvalidArgument,
                 "scale: expected 1 with fp8_ds_mla, whose keys have their own, got %g",
                 static_cast<double>(t.scale));
  }
  if (is_narrow_float(stored) || stored == t.kv_c.dtype) return check_scale("scale", t.scale);
  return error(StatusCode::kInvalidType,
               "cache: expected dtype %s (as kv_c), an 8-bit float or fp8_ds_mla, got %s",
               to_string(t.kv_c.dtype), to_string(stored));
}

Status check_norm(const MlaAppendTensors& t, Device device) {
  const TensorArgument weight{"norm_weight", t.norm_weight};
  FLASHPLAN_RETURN_IF_ERROR(check_not_negative("eps", t.eps));
  if (t.norm_weight.empty()) return {};
  if (t.norm_weight.dtype != DType::kFloat32) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(weight, t.kv_c.dtype, " (as kv_c) or float32"));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_device(weight, device));
  return check_shape(weight, {Dim::exactly(t.kv_c.shape[1])});
}

Status check_rotation(const MlaAppendTensors& t, const Rope* rope, Dim tokens, Device device) {
  const TensorArgument positions{"positions", t.positions};
  const TensorArgument q_pe{"q_pe", t.q_pe, true};
  if (rope == nullptr) {
    for (const TensorArgument& other : {positions, q_pe}) {
      if (other.view.empty()) continue;
      return error(StatusCode::kInvalidArgument, "%s: expected none without rope, got a tensor",
                   other.name);
    }
    return {};
  }
  if (t.k_pe.empty()) {
    return error(StatusCode::kInvalidArgument, "k_pe: expected a tensor with rope, got none");
  }
  FLASHPLAN_RETURN_IF_ERROR(check_rope(*rope, t.k_pe.shape[1]));
  if (t.positions.dtype != DType::kInt64) {
    FLASHPLAN_RETURN_IF_ERROR(check_dtype(positions, DType::kInt32, " or int64"));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_device(positions, device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(positions, {tokens}));
  if (t.q_pe.empty()) return {};
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(q_pe, t.kv_c.dtype, " (as kv_c)"));
  FLASHPLAN_RETURN_IF_ERROR(check_device(q_pe, device));
  return check_shape(q_pe, {tokens, {0, INT32_MAX / kMaxLatentDim}, Dim::exactly(t.k_pe.shape[1])});
}

Status check(const MlaAppendTensors& t, const Rope* rope) {
  const TensorArgument cache{"cache", t.cache.latent, true};
  const TensorArgument slots{"slot_mapping", t.slot_mapping};
  const Device device = t.cache.latent.device;
  FLASHPLAN_RETURN_IF_ERROR(check_device_exists(cache));
  FLASHPLAN_RETURN_IF_ERROR(check_tokens(t, device));
  FLASHPLAN_RETURN_IF_ERROR(check_stored(t));
  const int64_t num_dims[] = {t.kv_c.shape[1], t.k_pe.empty() ? 0 : t.k_pe.shape[1]};
  FLASHPLAN_RETURN_IF_ERROR(check_mla_cache(t.cache, num_dims, device, true));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(slots, DType::kInt64, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(slots, device));
  int64_t most = std::min<int64_t>(INT32_MAX, t.kv_c.shape[0]);
  if (!t.k_pe.empty()) most = std::min(most, t.k_pe.shape[0]);
  FLASHPLAN_RETURN_IF_ERROR(check_shape(slots, {{0, most}}));
  FLASHPLAN_RETURN_IF_ERROR(check_norm(t, device));
  FLASHPLAN_RETURN_IF_ERROR(
      check_rotation(t, rope, Dim::at_least(t.slot_mapping.shape[0]), device));
  const TensorArgument arguments[] = {cache,
                                      {"cache_tail", t.cache.tail, true},
                                      {"q_pe", t.q_pe, true},
                                      {"kv_c", t.kv_c},
                                      {"k_pe", t.k_pe},
                                      slots,
                                      {"norm_weight", t.norm_weight},
                                      {"positions", t.positions}};
  return check_apart(arguments);
}

void place_rows(const TensorView& rows, MlaPart& part) {
  if (rows.empty()) return;
  part.rows = static_cast<char*>(rows.data);
  part.row_stride = stride_bytes(rows, 0);
  part.dtype = rows.dtype;
}

MlaAppendParams make_params(const MlaAppendTensors& t, const Rope* rope) {
  const int64_t num_dims[] = {t.kv_c.shape[1], t.k_pe.empty() ? 0 : t.k_pe.shape[1]};
  MlaAppendParams p;
  place_parts(t.cache, num_dims, p.parts);
  place_rows(t.kv_c, p.parts[0]);
  place_rows(t.k_pe, p.parts[1]);
  for (MlaPart& part : p.parts) {
    part.verbatim = part.dtype == part.cache_dtype && t.scale == 1.0F;
  }
  p.places.pages.num_pages = num_pages_of(t.cache);
  p.places.pages.page_size = make_divisor(static_cast<int32_t>(page_size_of(t.cache)));
  p.places.slots = static_cast<const int64_t*>(t.slot_mapping.data);
  if (rope != nullptr) {
    static_cast<RopeTurns&>(p.rope) = make_rope_turns(*rope, static_cast<int32_t>(num_dims[1]));
    p.rope.head_dim = static_cast<int32_t>(num_dims[1]);
    p.rope.dtype = t.kv_c.dtype;
    p.rope.positions = t.positions.data;
    p.rope.has_wide_positions = t.positions.dtype == DType::kInt64;
    if (!t.q_pe.empty()) p.rope.sides[0] = make_rope_side(t.q_pe, t.q_pe);
  }
  p.norm_weight = t.norm_weight.empty() ? nullptr : t.norm_weight.data;
  p.weight_dtype = t.norm_weight.empty() ? t.kv_c.dtype : t.norm_weight.dtype;
  p.eps = t.eps;
  p.scale = t.scale;
  p.has_scales = t.cache.latent.dtype == DType::kFp8DsMla;
  p.num_rows = static_cast<int32_t>(t.slot_mapping.shape[0]);
  return p;
}

}  // namespace

Status append_mla(const MlaAppendTensors& t, const Rope* rope, Stream stream) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check(t, rope));
  if (t.slot_mapping.shape[0] == 0) return {};
  const Device device = t.cache.latent.device;
  const MlaAppendParams p = make_params(t, rope);
  if (device.type == DeviceType::kCuda) return cuda::append_mla(p, device, stream);
  FLASHPLAN_RETURN_IF_ERROR(
      check_slots(t.slot_mapping, page_size_of(t.cache), num_pages_of(t.cache)));
  if (rope != nullptr) FLASHPLAN_RETURN_IF_ERROR(check_positions(t.positions));
  cpu::append_mla(p);
  return {};
}

}  // namespace flashplan
