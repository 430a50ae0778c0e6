// SPDX-License-Identifier: Apache-2.0
// Plan: checks the options, selects the kernels, lays out the workspace, and plans batches.
#include "flashplan/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <new>
#include <span>
#include <string_view>
#include <thread>

#include "api/batch_checks.h"
#include "api/kernels.h"
#include "api/plan_impl.h"
#include "api/plan_schedules.h"
#include "common/error.h"
#include "common/processors.h"
#include "cpu/compile_variant.h"
#include "cuda/compile_variant.h"
#include "cuda/device.h"
#include "cuda/launch_kernel.h"
#include "cuda/range.h"
#include "plan/kernel/select_kernel.h"
#include "plan/prepared_kv.h"
#include "plan/rope_turns.h"
#include "variant/nvrtc.h"

namespace flashplan {
namespace {

/// Writes where the masks of the requests begin. Returns how many bits a row of the mask must have.
int64_t place_masks(const Batch& batch, int32_t* mask_begins) {
  int64_t num_bits = 0;
  for (int32_t r = 0; r < batch.batch_size; ++r) {
    const int32_t qo_len = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
    const bool is_given = batch.mask_begin != nullptr;
    mask_begins[r] = is_given ? batch.mask_begin[r] : kAtFirstQuery;
    const int64_t own_bits =
        is_given ? int64_t{batch.kv_lens[r]} - batch.mask_begin[r] : int64_t{qo_len};
    if (qo_len > 0) num_bits = std::max(num_bits, own_bits);
  }
  return num_bits;
}

/// The kernel family that the environment variable FLASHPLAN_KERNEL_FAMILY names; empty: any. Tests
/// set it to test a family that would not be preferred. It is read once.
std::string_view family_to_test() noexcept {
  static const char* const name = std::getenv("FLASHPLAN_KERNEL_FAMILY");
  return name != nullptr ? name : "";
}

/// The Division that the environment variable FLASHPLAN_SCHEDULE names. Benchmarks set it to
/// compare divisions. It is read once.
///   kUnsupported  the variable names no Division
Status division_to_measure(Division* division) noexcept {
  static const char* const given = std::getenv("FLASHPLAN_SCHEDULE");
  const std::string_view name = given != nullptr ? given : "balanced";
  if (name == "balanced") {
    *division = Division::kBalanced;
  } else if (name == "whole") {
    *division = Division::kWhole;
  } else if (name == "in_order") {
    *division = Division::kInOrder;
  } else {
    return error(StatusCode::kUnsupported,
                 "FLASHPLAN_SCHEDULE: expected balanced, whole or in_order, got %.*s",
                 static_cast<int>(name.size()), name.data());
  }
  return {};
}

DeviceLimits device_limits(Device device) noexcept {
  DeviceLimits limits;
  limits.kernels = kernels_for(device.type);
  if (device.type == DeviceType::kCpu) {
    limits.num_processors = num_processors();
    return limits;
  }
  limits.family = family_to_test();
  limits.num_gpus = cuda::num_devices();
  if (device.index < 0 || device.index >= limits.num_gpus) return limits;
  const cuda::DeviceFacts& facts = cuda::device_facts(device.index);
  limits.num_processors = facts.num_sms;
  limits.major = facts.major;
  limits.minor = facts.minor;
  return limits;
}

/// Compiles a kernel with the options' variant and rotation, or gets it from the cache, and stores
/// the handle of its code in `kernel`.
Status compile_variant(const AttentionOptions& options, const RopeTurns& rope,
                       Kernel* kernel) noexcept {
  if (options.device.type == DeviceType::kCpu) return cpu::compile_variant(options, kernel);
  return cuda::compile_variant(options, options.rope ? &rope : nullptr, kernel);
}

/// Compiles the kernels of a plan. Two kernels are compiled at the same time, by two threads,
/// because each takes seconds.
Status compile_variants(const AttentionOptions& options, const RopeTurns& rope,
                        std::span<PlanKernel> kernels) noexcept {
  if (!needs_compiler(options)) return {};
  Status last;
  const auto compile_last = [&]() noexcept {
    last = compile_variant(options, rope, &kernels.back().choice.kernel);
  };
  std::thread thread;
  if (kernels.size() > 1) {
    try {
      thread = std::thread(compile_last);
    } catch (const std::exception&) {  // there are no more threads, or no memory for one
      compile_last();
    }
  }
  const Status first = compile_variant(options, rope, &kernels.front().choice.kernel);
  if (thread.joinable()) thread.join();
  return first.ok() ? last : first;
}

/// Checks that this machine has a compiler, if the options' variant or rotation needs one.
Status check_compiler(const AttentionOptions& options) noexcept {
  if (!needs_compiler(options)) return {};
  if (options.device.type == DeviceType::kCpu) return cpu::find_compiler();
  return load_nvrtc(options.variant.empty() ? "rope" : "variant");
}

/// Allocates and loads what a plan on a GPU needs before its first batch.
Status create_on_gpu(const ScheduleBounds& bounds, Plan::Impl* impl) noexcept {
  const int32_t device = impl->options.device.index;
  const cuda::DeviceGuard guard(device);
  FLASHPLAN_RETURN_IF_ERROR(guard.status());
  const cuda::ApartFromCaptures apart;
  std::array<int32_t, KernelChoices::kMost> num_ctas = {};
  for (std::size_t i = 0; i < impl->kernels.size(); ++i) {
    const KernelChoice& choice = impl->kernels[i].choice;
    FLASHPLAN_RETURN_IF_ERROR(cuda::prepare(choice.kernel, !needs_compiler(impl->options)));
    num_ctas[i] = choice.num_ctas;
  }
  return impl->device_schedule.emplace().create(device, bounds, impl->options.num_kv_heads,
                                                {num_ctas.data(), impl->kernels.size()});
}

/// Decides which requests' keys the kernel prepares, and in which tiles of the workspace.
void prepare_kv(const Batch& batch, const ScheduleMemory& memory, Plan::Impl* impl) {
  if (memory.prepared.first_tiles == nullptr) return;
  const PlanKernel& kernel = impl->kernel();
  impl->num_prepared_tiles =
      choose_prepared_kv(batch, kernel.scheduler.shape(), impl->schedule().segments,
                         kernel.layout.max_prepared_tiles, memory.prepared);
}

/// Keeps what run() needs to know about a batch, which already has a schedule.
void keep_facts(const Batch& batch, Plan::Impl* impl) {
  const AttentionOptions& options = impl->options;
  const int32_t* kv_lens = batch.kv_lens;
  impl->batch_size = batch.batch_size;
  impl->num_shared_prefixes = batch.num_shared_prefixes;
  impl->num_tokens = batch.qo_indptr[batch.batch_size];
  impl->has_key_ranges = batch.key_ranges != nullptr;
  impl->kv_lens.assign(kv_lens, kv_lens + batch.batch_size);
  impl->longest_request =
      static_cast<int32_t>(std::max_element(kv_lens, kv_lens + batch.batch_size) - kv_lens);
  if (!options.batch_invariant && !impl->divides_batches()) {
    const int64_t num_rows =
        int64_t{impl->num_tokens} * (options.num_qo_heads / options.num_kv_heads);
    PlanKernel& kernel = impl->kernel();
    const int32_t few_rows = kernel.choice.kernel.geometry.bodies[0].rows;
    kernel.has_few_rows = num_rows <= int64_t{few_rows} * batch.batch_size;
  }
  impl->num_kv_rows = 0;
  if (options.page_size > 0) return;
  const auto& segments = impl->schedule().segments;
  for (std::size_t r = 0; r < impl->kv_lens.size(); ++r) {
    if (kv_lens[r] > 0) impl->num_kv_rows = segments[r].kv_row + kv_lens[r];
  }
}

}  // namespace

Plan::Plan() noexcept = default;
Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;

Status Plan::create(const AttentionOptions& options, Plan* plan) noexcept try {
  if (plan == nullptr) {
    return error(StatusCode::kInvalidArgument, "plan: expected a pointer, got null");
  }
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->device = device_limits(options.device);
  Division division = Division::kBalanced;
  FLASHPLAN_RETURN_IF_ERROR(division_to_measure(&division));
  KernelChoices choices;
  FLASHPLAN_RETURN_IF_ERROR(select_kernel(options, impl->device, &choices));
  impl->kernels.resize(choices.second ? 2 : 1);
  if (options.rope) impl->rope = make_rope_turns(*options.rope, options.head_dim_qk);
  const WorkspaceLayouts layouts = layout_workspace(options, choices, options.workspace_bytes);
  const std::size_t workspace_bytes = layouts.total;
  impl->kernels.front().choice = choices.first;
  impl->kernels.front().layout = layouts.first;
  if (choices.second) {
    impl->kernels.back().choice = *choices.second;
    impl->kernels.back().layout = layouts.second;
  }
  FLASHPLAN_RETURN_IF_ERROR(compile_variants(options, impl->rope, impl->kernels));
  ScheduleBounds bounds = prepare_schedules(division, impl.get());
  for (int32_t i = 0; i < impl->num_kernels(); ++i) {
    PlanKernel& kernel = impl->kernels[static_cast<std::size_t>(i)];
    // A graph may capture a kernel before plan() has chosen it. Until then, the kind of batches
    // that the kernel is for decides whether few_rows_first or many_rows_first is launched.
    kernel.has_few_rows = impl->kind_of_kernel(i) == BatchKind::kFewRows;
  }
  AttentionOptions& filled = impl->options;
  filled.num_ctas = impl->kernel().choice.num_ctas;
  if (!filled.softmax_scale) {
    filled.softmax_scale = 1.0F / std::sqrt(static_cast<float>(options.head_dim_qk));
  }
  if (options.workspace_bytes && workspace_bytes > *options.workspace_bytes) {
    return error(StatusCode::kInvalidArgument, "workspace: expected >= %zu bytes, got %zu",
                 workspace_bytes, *options.workspace_bytes);
  }
  filled.workspace_bytes = workspace_bytes;
  bounds.mask_begins = options.custom_mask ? options.max_batch_size : 0;
  impl->prefixes.reserve(options.max_batch_size);
  const auto most = static_cast<std::size_t>(most_requests(options));
  impl->kv_lens.reserve(most);
  if (options.topk > 0) impl->lists.reserve(options.max_qo_tokens);
  if (options.device.type == DeviceType::kCpu) {
    impl->buffers = ScheduleBuffers(bounds);
    impl->real_lens.reserve(most);
    if (options.page_size > 0) {
      impl->page_indptr.reserve(static_cast<std::size_t>(options.max_batch_size) + 1);
    }
  } else {
    FLASHPLAN_RETURN_IF_ERROR(create_on_gpu(bounds, impl.get()));
  }
  plan->impl_ = std::move(impl);
  return {};
} catch (const std::bad_alloc&) {
  return error(StatusCode::kOutOfMemory,
               "max_batch_size: expected host memory for a batch of %d, got none",
               options.max_batch_size);
}

Status Plan::plan(const Batch& given, Stream stream) noexcept {
  if (!impl_)
    return error(StatusCode::kNotReady, "plan: expected create() before plan(), got an empty Plan");
  const cuda::Range range("flashplan plan");
  const InUseGuard guard(impl_->in_use);
  if (!guard.acquired()) {
    return error(StatusCode::kNotReady, "plan: expected one thread at a time, got a second one");
  }
  FLASHPLAN_RETURN_IF_ERROR(check_batch(impl_->options, given));
  FLASHPLAN_RETURN_IF_ERROR(impl_->prefixes.read(given));
  cuda::DeviceSchedule* device_schedule =
      impl_->device_schedule ? &*impl_->device_schedule : nullptr;
  ScheduleMemory memory = impl_->buffers.memory();
  if (device_schedule != nullptr) {
    FLASHPLAN_RETURN_IF_ERROR(device_schedule->before_upload(stream, &memory));
  }
  impl_->planned = false;
  const int32_t topk = impl_->options.topk;
  const Batch batch = topk > 0 ? impl_->lists.batch_of_tokens(given, topk) : given;
  make_schedule(batch, memory, impl_.get());
  prepare_kv(batch, memory, impl_.get());
  const bool has_masks = impl_->options.custom_mask;
  impl_->num_mask_bits = has_masks ? place_masks(batch, memory.mask_begins) : 0;
  keep_facts(batch, impl_.get());
  if (device_schedule != nullptr) {
    std::array<const Schedule*, KernelChoices::kMost> schedules = {};
    for (int32_t i = 0; i < impl_->num_kernels(); ++i) {
      const auto k = static_cast<std::size_t>(i);
      if (impl_->takes(i)) schedules[k] = &impl_->kernels[k].scheduler.schedule();
    }
    FLASHPLAN_RETURN_IF_ERROR(device_schedule->upload(schedules, stream));
  }
  impl_->planned = true;
  return {};
}

std::size_t Plan::workspace_bytes() const noexcept {
  return impl_ ? *impl_->options.workspace_bytes : 0;
}

const AttentionOptions& Plan::options() const noexcept {
  static const AttentionOptions none;
  return impl_ ? impl_->options : none;
}

ScheduleView Plan::schedule() const noexcept {
  if (!impl_) return {};
  const Schedule& schedule = impl_->schedule();
  const KernelGeometry& geometry = impl_->kernel().choice.kernel.geometry;
  return {schedule.num_ctas(),      geometry.tile_q,           geometry.tile_kv,
          impl_->num_tokens,        schedule.num_partial_rows, schedule.cta_indptr.data(),
          schedule.cta_cost.data(), schedule.tiles.data()};
}

const char* Plan::kernel_name() const noexcept {
  return impl_ ? impl_->kernel().choice.kernel.name.data() : "";
}

Status is_supported(const AttentionOptions& options) noexcept {
  KernelChoices choices;
  FLASHPLAN_RETURN_IF_ERROR(select_kernel(options, device_limits(options.device), &choices));
  return check_compiler(options);
}

Status workspace_bytes(const AttentionOptions& options, std::size_t* bytes) noexcept {
  if (bytes == nullptr) {
    return error(StatusCode::kInvalidArgument, "bytes: expected a pointer, got null");
  }
  KernelChoices choices;
  FLASHPLAN_RETURN_IF_ERROR(select_kernel(options, device_limits(options.device), &choices));
  *bytes = layout_workspace(options, choices, std::nullopt).total;
  return {};
}

}  // namespace flashplan
