// SPDX-License-Identifier: Apache-2.0
#include "cpu/engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>

#include "abi/params.h"
#include "cpu/isa.h"
#include "cpu/kernel.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"
#include "flashplan/plan.h"

namespace flashplan::cpu {
namespace {

struct NamedKernels {
  const char* name;
  const KernelSet& set;
};

NamedKernels widest_kernels() noexcept {
  switch (widest_isa()) {
#if defined(FLASHPLAN_HAVE_AVX512)
    case Isa::kAvx512: return {"cpu_avx512", avx512::kernel_set()};
#endif
#if defined(FLASHPLAN_HAVE_AVX2)
    case Isa::kAvx2: return {"cpu_avx2", avx2::kernel_set()};
#endif
    default: return {"cpu_baseline", baseline::kernel_set()};
  }
}

// The CPU kernels serve any dtype of q and any head dim, so only the dtype of the cache counts.
Axis first_unserved(const Kernel& kernel, const AttentionOptions& options) noexcept {
  return kernel.kv_dtype == options.kv_dtype ? Axis::kNone : Axis::kKvDType;
}

std::size_t scratch_of_options(const Kernel& kernel, const AttentionOptions& options) noexcept {
  return scratch_bytes(kernel.geometry.tile_q, kernel.geometry.tile_kv, options.head_dim_qk,
                       options.head_dim_vo, options.rope.has_value());
}

constexpr KernelFamily kFamily = {.name = "cpu",
                                  .device = DeviceType::kCpu,
                                  .shares_prefixes = true,
                                  .first_unserved = first_unserved,
                                  .scratch_bytes = scratch_of_options,
                                  .preference = no_preference};

constexpr DType kKvDTypes[] = {DType::kFloat32,    DType::kFloat16,    DType::kBFloat16,
                               DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFp8DsMla};
constexpr std::size_t kNumKernels = std::size(kKvDTypes);

std::array<Kernel, kNumKernels> make_kernels() noexcept {
  const NamedKernels widest = widest_kernels();
  std::array<Kernel, kNumKernels> all;
  for (std::size_t i = 0; i < kNumKernels; ++i) {
    Kernel& kernel = all[i];
    kernel.name = widest.name;
    kernel.family = &kFamily;
    kernel.kv_dtype = kKvDTypes[i];
    // There are several queues per thread, and a thread takes the next queue when it is free. So a
    // thread that other programs slow down takes fewer queues.
    kernel.geometry = {.tile_q = kCpuTileQ,
                       .tile_kv = kCpuTileKv,
                       .bodies = {{{.rows = kCpuTileQ, .stages = 1}}},
                       .queues_per_processor = 4};
    kernel.tuning = cpu_tuning();
    kernel.code.run_queue = widest.set.of(kKvDTypes[i]);
  }
  return all;
}

/// Runs with a lower predicted cost, about 30 us, are done by one thread: waking a second one would
/// take longer than it saves.
constexpr int64_t kLeastCostToShare = 256;

struct Job {
  const AttentionParams& params;
  RunQueue run_queue;
};

void run_task(void* context, int32_t task, int32_t worker) noexcept {
  const Job& job = *static_cast<const Job*>(context);
  job.run_queue(job.params, task,
                static_cast<std::byte*>(job.params.workspace.scratch) +
                    worker * job.params.workspace.scratch_bytes);
}

}  // namespace

std::span<const Kernel> kernels() noexcept {
  static const auto all = make_kernels();
  return all;
}

void launch(const Kernel& kernel, const AttentionParams& params) noexcept {
  std::fill_n(params.schedule.arrivals + params.host.first_merge, params.host.num_merges,
              Arrivals{});
  Job job{params, kernel.code.run_queue};
  const int32_t wanted = params.host.total_cost < kLeastCostToShare ? 1 : params.schedule.num_ctas;
  ThreadPool::run(run_task, &job, params.schedule.num_ctas, wanted);
}

}  // namespace flashplan::cpu
