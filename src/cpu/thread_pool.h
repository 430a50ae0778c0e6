// SPDX-License-Identifier: Apache-2.0
// The library's one thread pool.
#pragma once

#include <cstdint>

namespace flashplan::cpu {

class ThreadPool {
 public:
  /// Does task number `task`. `worker` is the number of the thread that runs it, below
  /// min(max_workers, num_threads()); two tasks with the same worker never run at the same time.
  using Task = void (*)(void* context, int32_t task, int32_t worker) noexcept;

  /// Runs tasks [0, num_tasks) on the caller's thread and on up to max_workers - 1 others, and
  /// returns when all are done. If another caller has the pool, or no thread can be made, the
  /// caller's thread runs them all. Tasks run in the default mode of floating-point arithmetic.
  static void run(Task task, void* context, int32_t num_tasks, int32_t max_workers) noexcept;

  /// Sets the number of threads that calls of run() may use, the caller's included; at least 1.
  static void set_num_threads(int32_t num_threads) noexcept;
  static int32_t num_threads() noexcept;
};

}  // namespace flashplan::cpu
