// SPDX-License-Identifier: Apache-2.0
#include "api/plan_schedules.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "plan/kernel/batch_kind.h"
#include "plan/kernel/side_by_side.h"

namespace flashplan {
namespace {

/// Whether the mask of a request begins inside one of its shared prefixes. The keys of a
/// shared prefix are computed without masks, so in such a batch no prefix is shared.
bool has_masks_inside_prefixes(const Batch& batch) {
  if (batch.mask_begin == nullptr) return false;
  for (int32_t i = 0; i < batch.num_shared_prefixes; ++i) {
    const int32_t* prefix = batch.shared_prefixes + 3 * int64_t{i};
    const int32_t* begins = batch.mask_begin + prefix[0];
    if (*std::min_element(begins, begins + prefix[1]) < prefix[2]) return true;
  }
  return false;
}

/// Divides the processors between the plan's two kernels, which run the batch side by side. Each
/// kernel is launched with CTAs for the whole GPU, but only as many of them get work as its own
/// processors hold. Where the caller has chosen the number of CTAs, all of them get work.
void divide_processors(const Batch& batch, Plan::Impl* impl) {
  const int32_t all = impl->device.num_processors;
  PlanKernel& many = impl->kernel();
  PlanKernel& few = impl->other_kernel();
  const auto fills_gpu = [all](const PlanKernel& with) {
    const Kernel& kernel = with.choice.kernel;
    return with.choice.num_ctas == all * kernel.geometry.queues_per_processor &&
           kernel.architecture.number >= 90;  // else the kernels do not overlap
  };
  if (all < 2 || !fills_gpu(many) || !fills_gpu(few)) return;
  const int32_t of_many =
      processors_for_many_rows(batch, impl->options, many.choice.kernel.geometry.tile_q, all);
  many.scheduler.take_queues(of_many * many.choice.kernel.geometry.queues_per_processor);
  few.scheduler.take_queues((all - of_many) * few.choice.kernel.geometry.queues_per_processor);
}

/// Gives each request of a batch to the kernel for its rows, and makes the kernels' schedules.
void divide_batch(const Batch& batch, ScheduleMemory memory, Plan::Impl* impl) {
  const int32_t most_few = most_few_rows(impl->options);
  for (int32_t i = 0; i < impl->num_kernels(); ++i) {
    PlanKernel& kernel = impl->kernels[static_cast<std::size_t>(i)];
    const bool has_few = impl->kind_of_kernel(i) == BatchKind::kFewRows;
    kernel.scheduler.take_rows(has_few ? 1 : most_few + 1, has_few ? most_few : INT32_MAX);
    kernel.scheduler.take_queues(kernel.choice.num_ctas);
  }
  const RequestKinds kinds = kinds_of_requests(batch, impl->options);
  const BatchKind kind = kinds.many_rows ? BatchKind::kManyRows : BatchKind::kFewRows;
  impl->current = kind == impl->kind_of_kernel(0) ? 0 : 1;
  impl->takes_two = kinds.few_rows && kinds.many_rows;
  if (impl->takes_two) divide_processors(batch, impl);
  impl->kernel().scheduler.make(batch, {}, memory);
  if (!impl->takes_two) return;
  memory.tiles += impl->schedule().tiles.size();
  memory.merges_taken = static_cast<int32_t>(impl->schedule().merges.size());
  impl->other_kernel().scheduler.make(batch, {}, memory);
}

}  // namespace

ScheduleBounds prepare_schedules(Division division, Plan::Impl* impl) {
  const AttentionOptions& options = impl->options;
  const std::span<PlanKernel> kernels = impl->kernels;
  const bool divides = impl->divides_batches();
  std::array<ScheduleShape, KernelChoices::kMost> shapes;
  std::array<ScheduleBounds, KernelChoices::kMost> own;
  ScheduleBounds bounds = {};
  ScheduleBounds sums = {};
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    PlanKernel& kernel = kernels[i];
    shapes[i] = schedule_shape(options, kernel.choice, kernel.layout);
    shapes[i].division = division;
    own[i] = schedule_bounds(shapes[i], most_requests(options), options.max_qo_tokens);
    own[i].prepared_tiles = kernel.layout.max_prepared_tiles;
    bounds = larger(bounds, own[i]);
    sums.work_tiles += own[i].work_tiles;
    sums.merges += own[i].merges;
  }
  if (divides) bounds = larger(bounds, sums);
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    // The merges of both schedules are numbered down from the end of one buffer, so both schedulers
    // must know the size of the whole buffer.
    if (divides) own[i].merges = bounds.merges;
    kernels[i].scheduler.reserve(shapes[i], own[i]);
  }
  return bounds;
}

void make_schedule(const Batch& batch, const ScheduleMemory& memory, Plan::Impl* impl) {
  const AttentionOptions& options = impl->options;
  std::span<const PrefixGroup> prefixes;
  int64_t num_shared_keys = 0;
  if (may_share_prefixes(options) && !has_masks_inside_prefixes(batch)) {
    prefixes = impl->prefixes.in_order();
    num_shared_keys = impl->prefixes.num_shared_keys();
  }
  impl->reason = impl->keeps_kernel ? KernelReason::kCaptured : KernelReason::kRows;
  const bool chooses = impl->kernels.size() > 1 && !impl->keeps_kernel;
  if (chooses && impl->divides_batches() && prefixes.empty()) {
    return divide_batch(batch, memory, impl);
  }
  impl->takes_two = false;
  const auto make = [&] {
    Scheduler& scheduler = impl->kernel().scheduler;
    scheduler.take_rows(1, INT32_MAX);
    scheduler.take_queues(impl->kernel().choice.num_ctas);
    scheduler.make(batch, prefixes, memory);
  };
  if (!chooses) return make();
  const auto take_kernel_for = [&](BatchKind kind) {
    impl->current = kind == impl->kind_of_kernel(0) ? 0 : 1;
  };
  const BatchKind kind = kind_of(batch, options);
  if (kind == BatchKind::kFewRows &&
      may_gain_by_prefixes(batch, options, num_shared_keys, impl->device.num_processors)) {
    take_kernel_for(BatchKind::kManyRows);
    make();
    impl->reason = KernelReason::kPrefixes;
    if (impl->kernel().scheduler.gains_by_prefixes()) return;
    impl->reason = KernelReason::kRows;
  }
  take_kernel_for(kind);
  make();
}

}  // namespace flashplan
