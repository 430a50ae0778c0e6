// SPDX-License-Identifier: Apache-2.0
// Plan::run: checks the tensors against the plan, then calls the plan's kernel.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "abi/params.h"
#include "api/kernels.h"
#include "api/key_checks.h"
#include "api/plan_impl.h"
#include "api/run_checks.h"
#include "api/workspace_claim.h"
#include "checks/tensor_checks.h"
#include "common/error.h"
#include "cuda/device.h"
#include "cuda/range.h"
#include "cuda/tensor_maps.h"
#include "flashplan/plan.h"
#include "plan/kernel/batch_kind.h"
#include "variant/variant_impl.h"

namespace flashplan {
namespace {

/// Describes a tensor of keys or values, with or without a dimension of heads, to the kernels.
KvView kv_view(const TensorView& view, const AttentionOptions& options) {
  const bool is_paged = options.page_size > 0;
  const int32_t first = is_paged ? 1 : 0;  // the first dimension within a page
  const int64_t page_stride = is_paged ? view.stride[0] : 0;
  if (view.rank < first + 3) return {view.data, page_stride, view.stride[first], 0};
  const int32_t tokens = is_paged && options.kv_layout == KvLayout::kHND ? 2 : first;
  const int32_t heads = 2 * first + 1 - tokens;
  return {view.data, page_stride, view.stride[tokens], view.stride[heads]};
}

template <typename T>
TokenView<T> token_view(const TensorView& view) {
  return {static_cast<T*>(view.data), view.stride[0], view.stride[1]};
}

TensorParams tensor_params(const AttentionTensors& t, const AttentionOptions& options) {
  TensorParams p;
  const TensorView& v = options.shared_kv ? t.k : t.v;
  if (options.page_size > 0) {
    p.pages = make_page_table({t.block_table, t.page_indptr, t.page_indices}, options.page_size,
                              num_pages_of(t));
  }
  const TensorView& real_lens = options.topk > 0 ? t.topk_lens : t.kv_lens;
  if (!real_lens.empty()) p.kv_lens = static_cast<const int32_t*>(real_lens.data);
  p.q = token_view<const void>(t.q);
  p.k = kv_view(t.k, options);
  p.v = kv_view(v, options);
  p.o = token_view<void>(t.o);
  if (!t.lse.empty()) p.lse = token_view<float>(t.lse);
  constexpr float kLog2e = 1.4426950408889634F;
  p.lse_scale = options.lse_base2 ? kLog2e : 1.0F;
  p.q_dtype = options.q_dtype;
  p.kv_dtype = options.kv_dtype;
  p.o_dtype = options.o_dtype;
  p.vectorized = is_vectorized(t.q) && is_vectorized(t.k) && is_vectorized(v) &&
                 is_vectorized(t.o) && (t.q_tail.empty() || is_vectorized(t.q_tail)) &&
                 (t.k_tail.empty() || is_vectorized(t.k_tail));
  p.has_key_tail = !t.k_tail.empty() && !options.shared_kv;
  p.head_dim_qk = options.head_dim_qk;
  p.head_dim_vo = options.head_dim_vo;
  if (options.custom_mask) {
    const int64_t num_words = std::min<int64_t>(t.mask.shape[1], INT32_MAX);
    p.mask = {true, static_cast<int32_t>(num_words), static_cast<const uint32_t*>(t.mask.data),
              t.mask.stride[0]};
  }
  return p;
}

WorkspaceParams workspace_params(const AttentionTensors& t, const WorkspaceLayout& layout) {
  auto* workspace = static_cast<std::byte*>(t.workspace);
  WorkspaceParams p;
  p.scratch = workspace + layout.scratch;
  p.scratch_bytes = static_cast<int64_t>(layout.scratch_bytes);
  p.partial_o = reinterpret_cast<float*>(workspace + layout.partial_o);
  p.partial_lse = reinterpret_cast<float*>(workspace + layout.partial_lse);
  return p;
}

PreparedKv prepared_kv(const AttentionTensors& t, const Plan::Impl& plan, const PlanKernel& with) {
  PreparedKv kv;
  if (with.layout.max_prepared_tiles == 0) return kv;
  const KernelGeometry& geometry = with.choice.kernel.geometry;
  // Behind the real length of a request, a work tile must read zeros as values. Prepared values are
  // not zeros there, so runs with real lengths get no prepared keys and values.
  if (geometry.prepared_value_bytes > 0 && !t.kv_lens.empty()) return kv;
  auto* workspace = static_cast<unsigned char*>(t.workspace);
  kv.keys = workspace + with.layout.prepared_keys;
  if (geometry.prepared_value_bytes > 0) kv.values = workspace + with.layout.prepared_values;
  kv.num_kv_heads = plan.options.num_kv_heads;
  plan.device_schedule->place(&kv);
  return kv;
}

/// The parameters of the schedule of a plan on the CPU.
ScheduleParams host_schedule(const AttentionTensors& t, const Plan::Impl& plan) {
  const Schedule& schedule = plan.schedule();
  auto* workspace = static_cast<std::byte*>(t.workspace);
  ScheduleParams p;
  p.segments = schedule.segments.data();
  p.tiles = schedule.tiles.data();
  p.merges = schedule.merges.data() - schedule.first_merge;
  p.arrivals = reinterpret_cast<Arrivals*>(workspace + plan.kernel().layout.arrivals);
  p.mask_begins = plan.buffers.mask_begins();
  return p;
}

Sinks sinks_of(const TensorView& sinks) {
  if (sinks.empty()) return {};
  return {sinks.data, sinks.dtype == DType::kBFloat16};
}

VariantArguments variant_arguments(const AttentionTensors& t, const AttentionOptions& options) {
  VariantArguments arguments;
  const Variant::Impl* variant = options.variant.impl();
  if (variant == nullptr) return arguments;
  for (size_t i = 0; i < variant->tensors.size(); ++i) {
    arguments.tensors[i] = t.variant_tensors[i].data;
  }
  for (size_t i = 0; i < variant->scalars.size(); ++i) {
    arguments.scalars[i] =
        t.variant_scalars != nullptr ? t.variant_scalars[i] : variant->scalars[i].value;
  }
  return arguments;
}

HostParams host_params(const Plan::Impl& plan, const PlanKernel& with) {
  const Schedule& schedule = with.scheduler.schedule();
  HostParams p;
  p.shared_kv = plan.options.shared_kv;
  p.rope = plan.options.rope ? &plan.rope : nullptr;
  p.cta_indptr = schedule.cta_indptr.data();
  p.first_merge = schedule.first_merge;
  p.num_merges = static_cast<int32_t>(schedule.merges.size());
  p.total_cost = schedule.total_cost;
  p.has_few_rows = with.has_few_rows;
  return p;
}

TailParams tail_params(const AttentionTensors& t, const AttentionOptions& options) {
  const auto last_dim = [](const TensorView& view) {
    return static_cast<int32_t>(view.shape[view.rank - 1]);
  };
  TailParams p;
  if (!t.q_tail.empty()) {
    p.q = token_view<const void>(t.q_tail);
    p.q_dims = last_dim(t.q_tail);
  }
  if (!t.k_tail.empty()) p.k = {kv_view(t.k_tail, options), last_dim(t.k_tail)};
  return p;
}

KeyLists key_lists(const TensorView& indices) {
  if (indices.empty()) return {};
  return {static_cast<const int32_t*>(indices.data), indices.stride[0],
          static_cast<int32_t>(indices.shape[1])};
}

/// The parameters for a run of kernel number `number` of the plan.
AttentionParams make_params(const AttentionTensors& t, const Plan::Impl& plan, int32_t number) {
  const AttentionOptions& options = plan.options;
  const PlanKernel& with = plan.kernels[static_cast<std::size_t>(number)];
  const Kernel& kernel = with.choice.kernel;
  AttentionParams p;
  p.schedule =
      plan.device_schedule ? plan.device_schedule->schedule(number) : host_schedule(t, plan);
  p.schedule.tile_q = kernel.geometry.tile_q;
  p.schedule.group_size = make_divisor(options.num_qo_heads / options.num_kv_heads);
  p.schedule.chunk_kv = with.choice.chunk_kv;
  p.schedule.num_ctas = with.choice.num_ctas;
  p.tensors = tensor_params(t, options);
  p.mask = {options.causal, options.window_left};
  p.variant = {.logits_scale = *options.softmax_scale * t.q_scale * t.k_scale,
               .softcap = options.softcap,
               .v_scale = options.shared_kv ? t.k_scale : t.v_scale,
               .sinks = sinks_of(t.sinks),
               .k_scales = head_scales(t.k_scales),
               .v_scales = head_scales(options.shared_kv ? t.k_scales : t.v_scales)};
  p.workspace = workspace_params(t, with.layout);
  p.host = host_params(plan, with);
  p.arguments = variant_arguments(t, options);
  p.prepared = prepared_kv(t, plan, with);
  p.tails = tail_params(t, options);
  p.lists = key_lists(t.topk_indices);
  p.q_scales = head_scales(t.q_scales);
  if (kernel.geometry.uses_tensor_maps) p.maps = cuda::encode_tensor_maps(kernel, options, t);
  return p;
}

/// Launches kernel number `number` of the plan. `follows`: another kernel of the same run was
/// launched before it on `stream`, and the two run side by side. They write to different results
/// and to different parts of the workspace, and the first kernel has waited for all earlier work on
/// the stream, so the second one need not wait for the first.
Status launch_kernel(const AttentionTensors& t, const Plan::Impl& plan, int32_t number,
                     Stream stream, bool follows = false) noexcept {
  const PlanKernel& with = plan.kernels[static_cast<std::size_t>(number)];
  AttentionParams params = make_params(t, plan, number);
  params.host.pdl = t.pdl || follows;
  params.schedule.beside_last = follows;
  return launch(with.choice.kernel, params, stream);
}

/// Captures launches that serve every later batch, even if the current batch has no rows. If the
/// plan's bounds allow prompts, all kernels of the plan are captured; in a replay, a kernel without
/// work returns at once. If the bounds allow only decodes, a second launch would cost too much, so
/// only the current kernel is captured, and later plans use that kernel.
Status capture(const AttentionTensors& t, Plan::Impl* plan, Stream stream) noexcept {
  if (kind_of_bounds(plan->options) == BatchKind::kFewRows) plan->keeps_kernel = true;
  if (plan->keeps_kernel) return launch_kernel(t, *plan, plan->current, stream);
  for (int32_t i = 0; i < plan->num_kernels(); ++i) {
    FLASHPLAN_RETURN_IF_ERROR(launch_kernel(t, *plan, i, stream, i > 0));
  }
  return {};
}

Status run_on_gpu(const AttentionTensors& t, Plan::Impl* plan, Stream stream) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_planned_columns(t, *plan));
  const cuda::DeviceGuard guard(plan->options.device.index);
  FLASHPLAN_RETURN_IF_ERROR(guard.status());
  bool capturing = false;
  FLASHPLAN_RETURN_IF_ERROR(cuda::is_capturing(stream, &capturing));
  if (capturing) return capture(t, plan, stream);
  if (plan->num_tokens == 0) return {};
  FLASHPLAN_RETURN_IF_ERROR(plan->device_schedule->before_run(stream));
  Status launched;
  bool follows = false;
  for (int32_t i = 0; i < plan->num_kernels() && launched.ok(); ++i) {
    if (!plan->takes(i)) continue;
    launched = launch_kernel(t, *plan, i, stream, follows);
    follows = follows || launched.ok();
  }
  if (!follows) return launched;
  // If only the second launch has failed, the first kernel still runs, so later uploads and runs
  // must wait for it.
  const Status recorded = plan->device_schedule->after_run(stream);
  return launched.ok() ? recorded : launched;
}

/// Returns the tensors with copies of kv_lens or topk_lens, and of page_indptr, in memory of the
/// plan. Another thread of the caller may write to the originals during the run, but the kernel
/// must use the values that were checked.
AttentionTensors with_copies(const AttentionTensors& given, Plan::Impl* plan) noexcept {
  AttentionTensors t = given;
  const auto copy = [](TensorView* view, int32_t count, std::vector<int32_t>* to) {
    if (view->empty()) return;
    const auto* first = static_cast<const int32_t*>(view->data);
    to->assign(first, first + count);
    view->data = to->data();
  };
  copy(plan->options.topk > 0 ? &t.topk_lens : &t.kv_lens, plan->batch_size, &plan->real_lens);
  copy(&t.page_indptr, plan->batch_size + 1, &plan->page_indptr);
  return t;
}

Status run_on_cpu(const AttentionTensors& t, Plan::Impl* plan) noexcept {
  FLASHPLAN_RETURN_IF_ERROR(check_values(t, *plan));
  if (plan->num_tokens == 0) return {};
  const WorkspaceClaim claim(t.workspace, *plan->options.workspace_bytes);
  if (!claim.acquired()) {
    return error(StatusCode::kNotReady,
                 "workspace: expected one run at a time in it, got a second one");
  }
  return launch_kernel(t, *plan, plan->current, {});
}

}  // namespace

Status Plan::run(const AttentionTensors& tensors, Stream stream) noexcept {
  if (!impl_) {
    return error(StatusCode::kNotReady, "run: expected create() before run(), got an empty Plan");
  }
  const cuda::Range range("flashplan run");
  const InUseGuard guard(impl_->in_use);
  if (!guard.acquired()) {
    return error(StatusCode::kNotReady, "run: expected one thread at a time, got a second one");
  }
  if (!impl_->planned) {
    return error(StatusCode::kNotReady, "run: expected plan() before run(), got no plan");
  }
  FLASHPLAN_RETURN_IF_ERROR(check_tensors(tensors, *impl_));
  if (impl_->device_schedule) return run_on_gpu(tensors, impl_.get(), stream);
  if (tensors.kv_lens.empty() && tensors.topk_lens.empty() && tensors.page_indptr.empty()) {
    return run_on_cpu(tensors, impl_.get());
  }
  return run_on_cpu(with_copies(tensors, impl_.get()), impl_.get());
}

}  // namespace flashplan
