// SPDX-License-Identifier: Apache-2.0
#include "api/workspace_claim.h"

#include <mutex>

#if defined(__unix__)
#include <pthread.h>
#endif

namespace flashplan {
namespace {

std::mutex mutex;
WorkspaceClaim* first = nullptr;

/// A forked child has only one thread. The mutex may be held, and claims listed, by threads that it
/// does not have.
bool survive_forks() noexcept {
#if defined(__unix__)
  pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                 [] {
                   first = nullptr;
                   mutex.unlock();
                 });
#endif
  return true;
}

}  // namespace

WorkspaceClaim::WorkspaceClaim(const void* memory, std::size_t size) noexcept
    : begin_(reinterpret_cast<uintptr_t>(memory)), end_(begin_ + size) {
  [[maybe_unused]] static const bool once = survive_forks();
  const std::lock_guard lock(mutex);
  for (const WorkspaceClaim* claim = first; claim != nullptr; claim = claim->next_) {
    if (claim->begin_ < end_ && begin_ < claim->end_) return;
  }
  next_ = first;
  if (first != nullptr) first->previous_ = this;
  first = this;
  acquired_ = true;
}

WorkspaceClaim::~WorkspaceClaim() {
  if (!acquired_) return;
  const std::lock_guard lock(mutex);
  if (previous_ != nullptr) {
    previous_->next_ = next_;
  } else {
    first = next_;
  }
  if (next_ != nullptr) next_->previous_ = previous_;
}

}  // namespace flashplan
