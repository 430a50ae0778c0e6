// SPDX-License-Identifier: Apache-2.0
// Locks and global objects that a child of fork() can still use. The child has one thread, while
// other threads of its parent may have held locks, or used shared state, at the moment of the fork.
#pragma once

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <new>

namespace flashplan {

/// Locks the mutex of `Guarded`, a type that names what the mutex guards. fork() waits until the
/// mutex is free, so a child never finds it held. Hold it briefly.
template <typename Guarded>
std::unique_lock<std::mutex> fork_safe_lock() {
  static std::mutex mutex;
  [[maybe_unused]] static const int once =
      pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  return std::unique_lock(mutex);
}

/// The process's only T, made at the first call; null if there is no memory. It is never destroyed:
/// threads may use it until the process ends. A forked child makes a T of its own, because another
/// thread may have been changing the parent's T at the moment of the fork.
template <typename T>
T* of_this_process() noexcept {
  static std::atomic<T*> current{nullptr};
  [[maybe_unused]] static const int once =
      pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  T* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  T* const made = new (std::nothrow) T();
  if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return made;
  delete made;  // another thread was faster
  return found;
}

}  // namespace flashplan
