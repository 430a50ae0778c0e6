// SPDX-License-Identifier: Apache-2.0
// Code that this process has compiled or loaded, once for each key.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "common/forks.h"

namespace flashplan {

/// The compiled code of this process, by key. Callers hold the `mutex` of a `Code` while they fill
/// it in. Nothing is ever destroyed, because threads may run the code until the process ends.
template <typename Code>
class Registry {
 public:
  Code& at(const std::string& key) {
    const std::scoped_lock lock(mutex_);
    std::unique_ptr<Code>& code = all_[key];
    if (!code) code = std::make_unique<Code>();
    return *code;
  }

  /// The registry of this process. A forked child gets an empty one.
  static Registry& instance() {
    if (auto* const registry = of_this_process<Registry>()) return *registry;
    throw std::bad_alloc();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Code>> all_;
};

}  // namespace flashplan
