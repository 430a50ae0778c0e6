// SPDX-License-Identifier: Apache-2.0
// In place of the library's attention_state.h: what merge_part.h uses of it and of ptx.h, for
// threads of the host.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "abi/work_queue.h"

#define FLASHPLAN_DEVICE inline

namespace flashplan::device {

inline thread_local int64_t kMostClocksOfWait = 0;  // ns

inline int64_t clock64() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}
inline int32_t arrive(int32_t* counter, int32_t amount = 1) {
  return std::atomic_ref(*counter).fetch_add(amount, std::memory_order_acq_rel);
}
inline int32_t load_relaxed(int32_t* value) {
  return std::atomic_ref(*value).load(std::memory_order_relaxed);
}
inline bool compare_and_swap(int32_t* value, int32_t last, int32_t next) {
  return std::atomic_ref(*value).compare_exchange_strong(last, next, std::memory_order_relaxed);
}
/// Takes its time, so that other threads see the value before, too.
inline void store_release(int32_t* to, int32_t value) {
  const int64_t begin = clock64();
  while (clock64() - begin < 1000) {
  }
  std::atomic_ref(*to).store(value, std::memory_order_release);
}

}  // namespace flashplan::device
