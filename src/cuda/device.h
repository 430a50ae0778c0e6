// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime's devices, errors, current device and capture mode. This file includes no CUDA
// header, so that its users compile without a toolkit; absent.cpp then replaces device.cpp.
#pragma once

#include <cstdint>

#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan::cuda {

struct DeviceFacts {
  char name[64] = {};
  int32_t num_sms = 0;
  int32_t major = 0;  // compute capability
  int32_t minor = 0;
};

/// The number of GPUs that this process sees; 0 where there is no driver. If CUDA fails to answer,
/// it is 0, too, and the next call asks again.
int32_t num_devices() noexcept;

/// The facts of a device in [0, num_devices()).
const DeviceFacts& device_facts(int32_t device) noexcept;

/// The Status for a cudaError_t: kOutOfMemory or kCudaError, with the message `<call>: expected
/// success, got <CUDA's text>`. Clears the runtime's last error, so that other users of CUDA do not
/// find it.
Status cuda_error(const char* call, int code) noexcept;

/// Makes `device` the current one until the end of the scope. Does nothing if it is current
/// already.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Status& status() const noexcept { return status_; }

 private:
  [[maybe_unused]] int32_t previous_ = -1;  // the device to restore, or -1; not used without CUDA
  Status status_;
};

/// Puts this thread into relaxed capture mode until the end of the scope. Otherwise, while another
/// thread captures a graph, CUDA refuses this thread's allocations, kernel loads and event queries,
/// and invalidates the capture.
class ApartFromCaptures {
 public:
  ApartFromCaptures() noexcept;
  ~ApartFromCaptures();
  ApartFromCaptures(const ApartFromCaptures&) = delete;
  ApartFromCaptures& operator=(const ApartFromCaptures&) = delete;

 private:
  // These members are not used in a build without CUDA.
  [[maybe_unused]] int mode_ = 0;  // the capture mode to restore
  [[maybe_unused]] bool has_changed_ = false;
};

/// Whether work given to `stream` would be recorded into a graph, or would break a graph that is
/// being recorded (the legacy default stream beside a capturing one).
Status is_capturing(Stream stream, bool* capturing) noexcept;

}  // namespace flashplan::cuda
