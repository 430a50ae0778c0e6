// SPDX-License-Identifier: Apache-2.0
#include "common/processors.h"

#include <algorithm>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace flashplan {
namespace {

int32_t count_processors() noexcept {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(CPU_COUNT(&set), 1);
#endif
  return static_cast<int32_t>(std::max(std::thread::hardware_concurrency(), 1U));
}

}  // namespace

int32_t num_processors() noexcept {
  static const int32_t count = count_processors();
  return count;
}

}  // namespace flashplan
