// SPDX-License-Identifier: Apache-2.0
// The code that was made in this process, once for each key.
#pragma once

#include <pthread.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace flashplan {

/// `Code` has a `mutex`, which is held while it is filled. Nothing is ever destroyed: threads may
/// run the code until the process ends.
template <typename Code>
class Registry {
 public:
  Code& at(const std::string& key) {
    const std::scoped_lock lock(mutex_);
    std::unique_ptr<Code>& code = all_[key];
    if (!code) code = std::make_unique<Code>();
    return *code;
  }

  /// The registry of the process. A forked child begins with an empty one: threads that it does not
  /// have may hold mutexes of its parent's, which is left alone, since the code may be run.
  static Registry& instance() {
    [[maybe_unused]] static const int once =
        pthread_atfork(nullptr, nullptr, [] { current_.store(nullptr); });
    Registry* registry = current_.load(std::memory_order_acquire);
    if (registry != nullptr) return *registry;
    auto made = std::make_unique<Registry>();
    if (current_.compare_exchange_strong(registry, made.get(), std::memory_order_acq_rel)) {
      return *made.release();
    }
    return *registry;  // another thread was faster
  }

 private:
  inline static std::atomic<Registry*> current_{nullptr};

  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Code>> all_;
};

}  // namespace flashplan
