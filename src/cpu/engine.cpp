// SPDX-License-Identifier: Apache-2.0
#include "cpu/engine.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string_view>

#include "abi/params.h"
#include "cpu/kernel.h"
#include "cpu/thread_pool.h"

namespace flashplan::cpu {
namespace {

struct NamedKernels {
  const char* name;
  const KernelSet& set;
};

/// The kernels of the widest instruction set that this machine has, and no wider ones than the
/// environment variable FLASHPLAN_MAX_CPU_ISA names ("avx2" or "baseline"), which is for tests.
NamedKernels widest_kernels() noexcept {
  [[maybe_unused]] const char* variable = std::getenv("FLASHPLAN_MAX_CPU_ISA");
  [[maybe_unused]] const std::string_view most = variable != nullptr ? variable : "";
#if defined(FLASHPLAN_HAVE_AVX512)
  if (most != "avx2" && most != "baseline" && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return {"cpu_avx512", avx512::kernel_set()};
  }
#endif
#if defined(FLASHPLAN_HAVE_AVX2)
  // (No name for f16c in every compiler; processors with the others have it.)
  if (most != "baseline" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("fma")) {
    return {"cpu_avx2", avx2::kernel_set()};
  }
#endif
  return {"cpu_baseline", baseline::kernel_set()};
}

const NamedKernels& kernels() noexcept {
  static const NamedKernels widest = widest_kernels();
  return widest;
}

/// Below so much predicted work, about 30 us, waking a second thread costs more than it brings.
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

Status launch(const AttentionParams& params, Stream /*stream*/) noexcept {
  std::fill_n(params.schedule.arrivals, params.host.num_splits, 0);
  Job job{params, kernels().set.run_queue[static_cast<int32_t>(params.tensors.kv_dtype)]};
  const int32_t wanted = params.host.total_cost < kLeastCostToShare ? 1 : params.schedule.num_ctas;
  ThreadPool::run(run_task, &job, params.schedule.num_ctas, wanted);
  return {};
}

}  // namespace

Status find_kernel(const KernelConfig& config, LaunchFunction* launch_function,
                   const char** name) noexcept {
  static_cast<void>(config);  // every dtype is compiled in
  *launch_function = launch;
  *name = kernel_set_name();
  return {};
}

const char* kernel_set_name() noexcept { return kernels().name; }

}  // namespace flashplan::cpu
