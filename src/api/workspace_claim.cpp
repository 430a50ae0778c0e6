// SPDX-License-Identifier: Apache-2.0
#include "api/workspace_claim.h"

#include <pthread.h>

#include "common/forks.h"

namespace flashplan {
namespace {

WorkspaceClaim* first = nullptr;  // fork_safe_lock<WorkspaceClaim>() guards the list

}  // namespace

WorkspaceClaim::WorkspaceClaim(const void* memory, std::size_t size) noexcept
    : begin_(reinterpret_cast<uintptr_t>(memory)), end_(begin_ + size) {
  // A forked child empties the list, because claims of threads that only its parent has would never
  // be released.
  [[maybe_unused]] static const int once =
      pthread_atfork(nullptr, nullptr, [] { first = nullptr; });
  const auto lock = fork_safe_lock<WorkspaceClaim>();
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
  const auto lock = fork_safe_lock<WorkspaceClaim>();
  if (previous_ != nullptr) {
    previous_->next_ = next_;
  } else {
    first = next_;
  }
  if (next_ != nullptr) next_->previous_ = previous_;
}

}  // namespace flashplan
