// SPDX-License-Identifier: Apache-2.0
// The workspace of a Plan: memory of its own, or the caller's.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

#include "flashplan/tensor.h"
#include "tensor.h"

namespace flashplan {

/// Contiguous writable memory of any dtype on `device`, as bytes.
struct BytesArg {
  BytesArg(const char* name, nb::handle object, Device device);
  void* data = nullptr;
  std::size_t size = 0;
};

/// Aligned to kWorkspaceAlignment.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  /// Uses the caller's memory, kept alive from here on. Raises TypeError or ValueError.
  void borrow(nb::object memory, Device device);
  /// Allocates. Raises MemoryError or CudaError.
  void allocate(std::size_t size, Device device);

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
  Device device_;
  bool owned_ = false;
  nb::object owner_;
};

}  // namespace flashplan
