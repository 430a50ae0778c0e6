// SPDX-License-Identifier: Apache-2.0
#include "flashplan/runtime.h"

#include <span>

#include "api/kernels.h"
#include "common/error.h"
#include "common/processors.h"
#include "cpu/thread_pool.h"
#include "cuda/device.h"
#include "flashplan/flashplan.h"

#define FLASHPLAN_TEXT_OF(x) #x
#define FLASHPLAN_TEXT(x) FLASHPLAN_TEXT_OF(x)

namespace flashplan {
namespace {

/// Lists kernels. Those that differ only in head dims, softcap and architecture share a line; they
/// are neighbours in `kernels`.
std::string kernels_text(std::span<const Kernel> kernels) {
  std::string text;
  const Kernel* last = nullptr;
  for (const Kernel& kernel : kernels) {
    const bool same_line = last != nullptr && last->family == kernel.family &&
                           last->q_dtype == kernel.q_dtype && last->kv_dtype == kernel.kv_dtype;
    const bool same_dims = same_line && last->head_dim_qk == kernel.head_dim_qk &&
                           last->head_dim_vo == kernel.head_dim_vo;
    if (!same_line) {
      text.append(text.empty() ? "" : "\n").append("cuda kernels: ");
      text.append(kernel.family->name).append(", q ").append(to_string(kernel.q_dtype));
      if (kernel.narrow_q_dtype) text.append(" or ").append(to_string(*kernel.narrow_q_dtype));
      text.append(", kv ").append(to_string(kernel.kv_dtype)).append(", head dims");
    }
    if (!same_dims) {
      text.append(" ").append(std::to_string(kernel.head_dim_qk));
      if (kernel.head_dim_vo != kernel.head_dim_qk) {
        text.append("x").append(std::to_string(kernel.head_dim_vo));
      }
    }
    last = &kernel;
  }
  return text.append("\n");
}

std::string families_text() {
  std::string text = kernels_for(DeviceType::kCpu)[0].family->name;
  const KernelFamily* last = nullptr;
  for (const Kernel& kernel : kernels_for(DeviceType::kCuda)) {
    if (kernel.family != last) text.append(", ").append(kernel.family->name);
    last = kernel.family;
  }
  return text;
}

std::string cuda_text() {
  const std::span<const Kernel> kernels = kernels_for(DeviceType::kCuda);
  if (kernels.empty()) return "cuda: not built (" FLASHPLAN_WHY_NO_CUDA ")\n";
  std::string text = std::string("cuda: built for ") + architectures_of(kernels).text + "\n";
  text += kernels_text(kernels);
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
  text += "kernel families: " + families_text() + "\n";
  text.append("cpu kernels: ").append(kernels_for(DeviceType::kCpu)[0].name).append("\n");
  text += "cpu dtypes: float32, float16, bfloat16; kv also float8_e4m3fn, float8_e5m2\n";
  text += "cpu threads: " + std::to_string(num_threads()) + " of " +
          std::to_string(num_processors()) + " processors\n";
  text += cuda_text();
  return text;
} catch (...) {
  return {};
}

}  // namespace flashplan
