// SPDX-License-Identifier: Apache-2.0
// The CUDA stream of a call: the caller's own, or the current one of the caller's framework.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "bindings/tensors/producer.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// The device and the stream of a call. On the CPU there is no stream.
struct CallStream {
  Device device;
  Stream handle = nullptr;
  nb::object owner = {};  // the Python object that keeps the stream alive, if there is one
  /// Set for frameworks that follow no stream, such as JAX: they may free a tensor, or read the
  /// result, as soon as the call returns, so the call waits for its work.
  bool must_finish = false;
  /// Set where a producer without a current stream made `handle` wait for its work on a tensor.
  bool waits_for_producer = false;
  /// Whether torch records gradients on this thread; asked once per call, for its first tensor.
  std::optional<bool> torch_records_gradients = {};

  bool on_cuda() const noexcept { return device.type == DeviceType::kCuda; }
  /// The handle in DLPack's encoding, where 1 is the legacy default stream and 0 is not allowed.
  intptr_t dlpack() const noexcept {
    return handle == nullptr ? 1 : reinterpret_cast<intptr_t>(handle);
  }
  /// Waits for the work on the stream if must_finish is set. Raises CudaError.
  void finish() const;
};

/// `stream` if it is given, else the current stream of the framework, else the library's own stream
/// of the device. On the CPU anything but None is refused.
CallStream call_stream(nb::handle stream, const Producer& producer, Device device);

/// The module if it is imported, else null.
nb::object module_if_imported(const char* name);

/// The producer whose stream is used where there is no tensor yet: torch if it is imported and can
/// use CUDA, else CuPy if that is imported, else one without a stream.
Producer imported_producer();

}  // namespace flashplan
