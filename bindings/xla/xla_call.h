// SPDX-License-Identifier: Apache-2.0
// Arguments, results and attributes of a call from XLA, checked as they are read.
#pragma once

#include <cstdint>

#include "bindings/xla/xla_ffi.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

class XlaCall {
 public:
  XlaCall(const xla::Call& call, DeviceType device) noexcept : call_(call), device_{device, 0} {}

  /// Reads where the call runs: the device and, on a GPU, the stream. Must be called first.
  Status begin() noexcept;
  Stream stream() const noexcept { return stream_; }
  /// XLA's number of the device among this process's devices of its kind, GPUs or CPUs. For a GPU
  /// it is CUDA's number, too. JAX may present the CPU as several devices.
  int32_t device_number() const noexcept { return device_number_; }

  /// Reads the next argument or result. Returns an error if none is left.
  Status argument(TensorView* view) noexcept;
  Status result(TensorView* view) noexcept;
  bool has_results() const noexcept { return num_results_ < call_.results.count; }

  Status attribute(const char* name, int64_t* value) const noexcept;
  Status attribute(const char* name, float* value) const noexcept;

 private:
  Status buffer(const xla::Buffers& buffers, int64_t index, TensorView* view) const noexcept;
  Status scalar(const char* name, int32_t dtype, void* value, size_t size) const noexcept;

  const xla::Call& call_;
  Device device_;
  int32_t device_number_ = 0;
  Stream stream_ = nullptr;
  int64_t num_arguments_ = 0;
  int64_t num_results_ = 0;
};

/// Makes an error of XLA; null if `status` is ok.
xla::Error* to_xla_error(const Status& status, const xla::Api& api) noexcept;

/// XLA may call a handler only to ask for its version and traits. If `call` is such a question,
/// this answers it and returns true, and the handler has nothing else to do.
bool told_metadata(const xla::Call& call) noexcept;

}  // namespace flashplan
