// SPDX-License-Identifier: Apache-2.0
// The workspace of a Plan: memory that it allocates, or the caller's.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <optional>

#include "bindings/tensors/tensor.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// Owns or borrows the memory of a workspace, which is aligned to kWorkspaceAlignment.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace() { release(); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  /// Uses the memory of a contiguous, writable tensor of any dtype on `device`, and keeps the
  /// tensor alive until release(). Raises TypeError or ValueError.
  void borrow(nb::object memory, Device device);
  /// Allocates `size` bytes on `device`. Raises MemoryError or CudaError.
  void allocate(std::size_t size, Device device);
  void release() noexcept;

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  /// The caller's object, for the garbage collector. May be null.
  nb::handle owner() const noexcept { return owner_; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
  Device device_;
  bool owned_ = false;
  nb::object owner_;
  std::optional<TensorArg> export_;  // keeps the memory alive; empty if owner_ is a NumPy array
};

}  // namespace flashplan
