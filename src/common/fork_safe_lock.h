// SPDX-License-Identifier: Apache-2.0
// A lock that outlives fork().
#pragma once

#include <pthread.h>

#include <mutex>

namespace flashplan {

/// Locks the mutex of `Guarded`, a type that names what it guards. fork() waits for it, so that no
/// child finds it held by a thread that the child does not have. Hold it briefly.
template <typename Guarded>
std::unique_lock<std::mutex> fork_safe_lock() {
  static std::mutex mutex;
  [[maybe_unused]] static const int once =
      pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  return std::unique_lock(mutex);
}

}  // namespace flashplan
