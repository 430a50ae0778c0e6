// SPDX-License-Identifier: Apache-2.0
#include "flashplan/runtime.h"

#include <span>

#include "common/error.h"
#include "common/processors.h"
#include "cpu/engine.h"
#include "cpu/thread_pool.h"
#include "cuda/device.h"
#include "flashplan/flashplan.h"
#include "kernels/instances.h"

#define FLASHPLAN_TEXT_OF(x) #x
#define FLASHPLAN_TEXT(x) FLASHPLAN_TEXT_OF(x)

namespace flashplan {
namespace {

/// One line for all instances that differ in head dims and softcap alone; these stand together.
std::string kernels_text() {
  const std::span<const KernelInstance> instances = kernel_instances();
  std::string text;
  const KernelInstance* line = nullptr;
  const KernelInstance* last = nullptr;
  for (const KernelInstance& instance : instances) {
    const bool same_line = line != nullptr && line->family == instance.family &&
                           line->q_dtype == instance.q_dtype && line->kv_dtype == instance.kv_dtype;
    const bool same_dims = same_line && last->head_dim_qk == instance.head_dim_qk &&
                           last->head_dim_vo == instance.head_dim_vo;
    if (!same_line) {
      line = &instance;
      text.append(text.empty() ? "" : "\n").append("cuda kernels: ");
      text.append(to_string(instance.family)).append(", q ").append(to_string(instance.q_dtype));
      text.append(", kv ").append(to_string(instance.kv_dtype)).append(", head dims");
    }
    if (!same_dims) {
      text.append(" ").append(std::to_string(instance.head_dim_qk));
      if (instance.head_dim_vo != instance.head_dim_qk) {
        text.append("x").append(std::to_string(instance.head_dim_vo));
      }
    }
    last = &instance;
  }
  return text.append("\n");
}

std::string cuda_text() {
  if (kernel_instances().empty()) return "cuda: not built\n";
  std::string text = std::string("cuda: built for ") + kernel_architectures() + "\n";
  text += kernels_text();
  if (cuda::num_devices() == 0) text += "cuda devices: none found\n";
  for (int32_t i = 0; i < cuda::num_devices(); ++i) {
    const cuda::DeviceFacts& facts = cuda::device_facts(i);
    text += "cuda device " + std::to_string(i) + ": " + facts.name + ", compute capability " +
            std::to_string(facts.major) + "." + std::to_string(facts.minor) + ", " +
            std::to_string(facts.num_sms) + " SMs\n";
  }
  return text;
}

}  // namespace

Status set_num_threads(int32_t num_threads) noexcept {
  if (num_threads < 1) {
    return error(StatusCode::kInvalidArgument, "num_threads: expected >= 1, got %d", num_threads);
  }
  cpu::ThreadPool::set_num_threads(num_threads);
  return {};
}

int32_t num_threads() noexcept { return cpu::ThreadPool::num_threads(); }

const char* version() noexcept {
  return FLASHPLAN_TEXT(FLASHPLAN_VERSION_MAJOR) "." FLASHPLAN_TEXT(
      FLASHPLAN_VERSION_MINOR) "." FLASHPLAN_TEXT(FLASHPLAN_VERSION_PATCH);
}

std::string show_config() noexcept try {
  std::string text;
  text += std::string("version: ") + version() + "\n";
  text += std::string("kernel families: cpu") + (kernel_instances().empty() ? "" : ", sm80") + "\n";
  text += std::string("cpu kernels: ") + cpu::kernel_set_name() + "\n";
  text += "cpu dtypes: float32, float16, bfloat16; kv also float8_e4m3fn, float8_e5m2\n";
  text += "cpu threads: " + std::to_string(num_threads()) + " of " +
          std::to_string(num_processors()) + " processors\n";
  text += cuda_text();
  return text;
} catch (...) {
  return {};
}

}  // namespace flashplan
