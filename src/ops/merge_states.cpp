// SPDX-License-Identifier: Apache-2.0
#include "flashplan/merge.h"

#include <cstdio>

#include "checks/tensor_checks.h"
#include "common/error.h"
#include "ops/checks.h"
#include "ops/operators.h"

namespace flashplan {
namespace {

/// Checks the shapes, dtypes and devices of a state against those of the first one.
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

/// The names of a state's tensors in messages.
struct StateNames {
  explicit StateNames(int32_t index) {
    std::snprintf(o, sizeof(o), "o[%d]", index);
    std::snprintf(lse, sizeof(lse), "lse[%d]", index);
  }
  char o[24];
  char lse[24];
};

}  // namespace

Status merge_states(const AttentionState* states, int32_t num_states, const AttentionState& out,
                    Stream stream, bool base2) noexcept {
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
      FLASHPLAN_RETURN_IF_ERROR(check_wide(o));
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
    FLASHPLAN_RETURN_IF_ERROR(check_apart_or_same(out_o, o));
    FLASHPLAN_RETURN_IF_ERROR(check_apart_or_same(out_lse, lse));
  }
  constexpr float kLn2 = 0.69314718055994531F;
  const float ln_base = base2 ? kLn2 : 1.0F;
  if (first.device.type == DeviceType::kCuda) {
    return cuda::merge_states(states, num_states, out, ln_base, stream);
  }
  cpu::merge_states(states, num_states, out, ln_base);
  return {};
}

}  // namespace flashplan
