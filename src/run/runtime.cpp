// SPDX-License-Identifier: Apache-2.0
#include "flashplan/runtime.h"

#include "common/error.h"
#include "common/processors.h"
#include "cpu/engine.h"
#include "cpu/thread_pool.h"
#include "flashplan/flashplan.h"

#define FLASHPLAN_TEXT_OF(x) #x
#define FLASHPLAN_TEXT(x) FLASHPLAN_TEXT_OF(x)

namespace flashplan {

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
  text += "kernel families: cpu\n";
  text += std::string("cpu kernels: ") + cpu::kernel_set_name() + "\n";
  text += "cpu dtypes: float32, float16, bfloat16; kv also float8_e4m3fn, float8_e5m2\n";
  text += "cpu threads: " + std::to_string(num_threads()) + " of " +
          std::to_string(num_processors()) + " processors\n";
  text += "cuda: not built\n";
  return text;
} catch (...) {
  return {};
}

}  // namespace flashplan
