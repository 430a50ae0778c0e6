// SPDX-License-Identifier: Apache-2.0
// The CUDA stream of a call: the caller's own, or the current one of the caller's framework.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "flashplan/tensor.h"
#include "producer.h"

namespace flashplan {

/// Where a call works. On the CPU there is no stream.
struct CallStream {
  Device device;
  Stream handle = nullptr;
  nb::object owner = {};  // keeps the stream alive, where a Python object does
  /// Set where a framework that follows no stream (JAX) may free a tensor, or read the result, as
  /// soon as the call returns.
  bool must_finish = false;
  /// Whether torch records gradients on this thread; asked once per call, for its first tensor.
  std::optional<bool> torch_records_gradients = {};

  bool on_cuda() const noexcept { return device.type == DeviceType::kCuda; }
  /// The handle as DLPack writes it, where 0 is not allowed and 1 is the legacy default stream.
  intptr_t dlpack() const noexcept {
    return handle == nullptr ? 1 : reinterpret_cast<intptr_t>(handle);
  }
  /// Waits if the work must be finished before the call returns. Raises CudaError.
  void finish() const;
};

/// `stream` if it is given, else the current stream of the framework, else the library's own stream
/// of the device. On the CPU anything but None is refused.
CallStream call_stream(nb::handle stream, const Producer& producer, Device device);

/// Null unless the module is imported.
nb::object module_if_imported(const char* name);

/// A producer to take a stream from where no tensor is at hand: torch if it is imported, else CuPy.
Producer imported_producer();

}  // namespace flashplan
