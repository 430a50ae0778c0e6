// SPDX-License-Identifier: Apache-2.0
// Registers the host workspaces that runs of this process are using.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashplan {

/// Claims memory for the life of the object, unless a run in another thread has claimed a part of
/// it: two runs would overwrite each other's partial results. Allocates nothing.
class WorkspaceClaim {
 public:
  WorkspaceClaim(const void* memory, std::size_t size) noexcept;
  ~WorkspaceClaim();
  WorkspaceClaim(const WorkspaceClaim&) = delete;
  WorkspaceClaim& operator=(const WorkspaceClaim&) = delete;
  bool acquired() const noexcept { return acquired_; }

 private:
  uintptr_t begin_;
  uintptr_t end_;
  // Neighbours in the list of all claims.
  WorkspaceClaim* previous_ = nullptr;
  WorkspaceClaim* next_ = nullptr;
  bool acquired_ = false;
};

}  // namespace flashplan
