// SPDX-License-Identifier: Apache-2.0
#include "checks/tensor_checks.h"
#include "common/error.h"
#include "flashplan/kv_cache.h"
#include "ops/append_checks.h"
#include "ops/checks.h"
#include "ops/operators.h"
#include "ops/rope_checks.h"

namespace flashplan {
namespace {

/// Checks what is asked of k, v and the caches beyond what append_paged_kv() asks.
Status check_kv(const AppendTensors& t) {
  FLASHPLAN_RETURN_IF_ERROR(check_wide({"k", t.k}));
  FLASHPLAN_RETURN_IF_ERROR(check_shape({"k", t.k}, {Dim::any(), Dim::any(), Dim::int32(2)}));
  FLASHPLAN_RETURN_IF_ERROR(check_dtype({"v", t.v}, t.k.dtype, " (as k)"));
  FLASHPLAN_RETURN_IF_ERROR(
      check_dtype({"v_cache", t.v_cache, true}, t.k_cache.dtype, " (as k_cache)"));
  for (const TensorArgument& other : {TensorArgument{"slot_mapping", t.slot_mapping},
                                      TensorArgument{"batch_indices", t.batch_indices},
                                      TensorArgument{"positions", t.positions}}) {
    if (other.view.empty()) continue;
    return error(StatusCode::kInvalidArgument,
                 "%s: expected none, since positions come from kv_lens, got a tensor", other.name);
  }
  return {};
}

Status check_queries(const TensorArgument& q, const TensorArgument& out_q, const AppendTensors& t) {
  const TensorView& k = t.k;
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(q, k.dtype, " (as k)"));
  FLASHPLAN_RETURN_IF_ERROR(check_device(q, k.device));
  FLASHPLAN_RETURN_IF_ERROR(check_shape(q, {Dim::int32(), Dim::int32(), Dim::exactly(k.shape[2])}));
  const int64_t elements =
      (q.view.shape[1] + k.shape[1]) * k.shape[2] + t.v.shape[1] * t.v.shape[2];
  if (elements > INT32_MAX) {
    return error(StatusCode::kInvalidArgument,
                 "q: expected <= %d elements of q, k and v in a token, got %lld", INT32_MAX,
                 static_cast<long long>(elements));
  }
  FLASHPLAN_RETURN_IF_ERROR(check_dtype(out_q, k.dtype, " (as k)"));
  FLASHPLAN_RETURN_IF_ERROR(check_rows_like(out_q, q.view, k.shape[2]));
  return check_apart_or_same(out_q, q);
}

/// Checks that caches share no memory with q and out_q, and out_q with no other argument but q.
Status check_all_apart(const TensorArgument& q, const TensorArgument& out_q,
                       const AppendTensors& t) {
  for (const TensorArgument& cache :
       {TensorArgument{"k_cache", t.k_cache, true}, TensorArgument{"v_cache", t.v_cache, true}}) {
    FLASHPLAN_RETURN_IF_ERROR(check_apart(cache, q));
    FLASHPLAN_RETURN_IF_ERROR(check_apart(cache, out_q));
  }
  for (const TensorArgument& other :
       {TensorArgument{"k", t.k}, TensorArgument{"v", t.v}, TensorArgument{"indptr", t.indptr},
        TensorArgument{"kv_lens", t.kv_lens}, TensorArgument{"block_table", t.block_table},
        TensorArgument{"page_indptr", t.page_indptr},
        TensorArgument{"page_indices", t.page_indices}, TensorArgument{"k_scale", t.k_scales},
        TensorArgument{"v_scale", t.v_scales}}) {
    if (!other.view.empty()) FLASHPLAN_RETURN_IF_ERROR(check_apart(out_q, other));
  }
  return {};
}

}  // namespace

Status rope_append_paged_kv(const TensorView& q, const AppendTensors& t, const Rope& rope,
                            const TensorView& out_q, Stream stream) noexcept {
  const TensorArgument q_arg{"q", q};
  const TensorArgument out_q_arg{"out_q", out_q, true};
  FLASHPLAN_RETURN_IF_ERROR(check_append(t));
  FLASHPLAN_RETURN_IF_ERROR(check_kv(t));
  FLASHPLAN_RETURN_IF_ERROR(check_queries(q_arg, out_q_arg, t));
  FLASHPLAN_RETURN_IF_ERROR(check_rope(rope, t.k.shape[2]));
  FLASHPLAN_RETURN_IF_ERROR(check_all_apart(q_arg, out_q_arg, t));
  const Device device = t.k_cache.device;
  const bool on_cpu = device.type == DeviceType::kCpu;
  if (on_cpu) FLASHPLAN_RETURN_IF_ERROR(check_append_values(t, q));

  RopeAppendParams p;
  p.rope = make_rope_params(rope, q);
  p.rope.sides[0] = make_rope_side(q, out_q);
  p.append = make_append_params(t, q);
  p.num_rows = p.append.num_rows;
  p.pdl = t.pdl;
  if (!has_work(p.append) && p.rope.sides[0].num_heads == 0) return {};
  if (p.num_rows == 0 || p.append.places.batch_size == 0) return {};
  if (!on_cpu) return cuda::rope_append_paged_kv(p, device, stream);
  cpu::rope_append_paged_kv(p);
  return {};
}

}  // namespace flashplan
