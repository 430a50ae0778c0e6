// SPDX-License-Identifier: Apache-2.0
#include "flashplan/merge.h"

#include <cstdio>

#include "api/tensor_checks.h"
#include "common/error.h"
#include "cpu/row_ops.h"
#include "kernels/row_ops.h"

namespace flashplan {
namespace {

Status check_float(const TensorArgument& o) {
  const DType dtype = o.view.dtype;
  if (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) return {};
  return error(StatusCode::kInvalidType, "%s: expected float32, float16 or bfloat16, got %s",
               o.name, to_string(dtype));
}

/// Shapes, dtypes and devices of one state against those of the first.
Status check_state(const TensorArgument& o, const TensorArgument& lse, const TensorView& first) {
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(o, first.dtype, " (as the first state)"));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(lse, DType::kFloat32, ""));
  FLASHPLAN_RETURN_IF_ERROR(check_device(o, first.device));
  FLASHPLAN_RETURN_IF_ERROR(check_device(lse, first.device));
  const Dim tokens = Dim::exactly(first.shape[0]);
  const Dim heads = Dim::exactly(first.shape[1]);
  FLASHPLAN_RETURN_IF_ERROR(check_shape(o, {tokens, heads, Dim::exactly(first.shape[2])}));
  return check_shape(lse, {tokens, heads});
}

/// What messages call a state.
struct StateNames {
  explicit StateNames(int32_t index) {
    std::snprintf(o, sizeof(o), "o[%d]", index);
    std::snprintf(lse, sizeof(lse), "lse[%d]", index);
  }
  char o[24];
  char lse[24];
};

/// Of views of one shape and dtype.
bool is_same_view(const TensorView& a, const TensorView& b) {
  bool same = a.data == b.data && a.rank == b.rank;
  for (int32_t d = 0; same && d < a.rank; ++d) {
    same = a.stride[d] == b.stride[d] || a.shape[d] == 1;
  }
  return same;
}

}  // namespace

Status merge_states(const AttentionState* states, int32_t num_states, const AttentionState& out,
                    Stream stream) noexcept {
  if (states == nullptr || num_states < 1) {
    return error(StatusCode::kInvalidArgument, "o: expected at least one state, got %d",
                 states == nullptr ? 0 : num_states);
  }
  const TensorView& first = states[0].o;
  const TensorArgument out_o{"out", out.o, true};
  const TensorArgument out_lse{"lse", out.lse, true};
  for (int32_t i = 0; i < num_states; ++i) {
    const StateNames names(i);
    const TensorArgument o{names.o, states[i].o};
    const TensorArgument lse{names.lse, states[i].lse};
    if (i == 0) {
      FLASHPLAN_RETURN_IF_ERROR(check_float(o));
      FLASHPLAN_RETURN_IF_ERROR(check_device_exists(o));
      FLASHPLAN_RETURN_IF_ERROR(check_shape(o, {Dim::any(), Dim::int32(), Dim::int32()}));
    }
    FLASHPLAN_RETURN_IF_ERROR(check_state(o, lse, first));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_state(out_o, out_lse, first));
  FLASHPLAN_RETURN_IF_ERROR(check_apart(out_o, out_lse));
  for (int32_t i = 0; i < num_states; ++i) {
    const StateNames names(i);
    const TensorArgument o{names.o, states[i].o};
    const TensorArgument lse{names.lse, states[i].lse};
    FLASHPLAN_RETURN_IF_ERROR(check_apart(out_o, lse));
    FLASHPLAN_RETURN_IF_ERROR(check_apart(out_lse, o));
    if (!is_same_view(out.o, states[i].o)) FLASHPLAN_RETURN_IF_ERROR(check_apart(out_o, o));
    if (!is_same_view(out.lse, states[i].lse)) FLASHPLAN_RETURN_IF_ERROR(check_apart(out_lse, lse));
  }
  if (first.device.type == DeviceType::kCuda) {
    return cuda::merge_states(states, num_states, out, stream);
  }
  cpu::merge_states(states, num_states, out);
  return {};
}

}  // namespace flashplan
