// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "common/error.h"
#include "cuda/runtime.h"

namespace flashplan::cuda {
namespace {

constexpr int32_t kMostDevices = 64;

struct Devices {
  int32_t count = 0;
  std::array<DeviceFacts, kMostDevices> facts;
};

/// Asks CUDA for the devices. Throws the cudaError_t of a failed call.
Devices find_devices() {
  Devices devices;
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  // Without a driver or a visible GPU the library runs on the CPU, so this is no error.
  const bool has_none = code == cudaErrorNoDevice || code == cudaErrorInsufficientDriver;
  if (!succeeded(code) && !has_none) throw code;
  if (has_none) count = 0;
  for (int32_t i = 0; i < std::min<int32_t>(count, kMostDevices); ++i) {
    cudaDeviceProp properties;
    const cudaError_t failed = cudaGetDeviceProperties(&properties, i);
    if (!succeeded(failed)) throw failed;
    DeviceFacts& facts = devices.facts[static_cast<size_t>(i)];
    std::snprintf(facts.name, sizeof(facts.name), "%.63s", properties.name);
    facts.num_sms = properties.multiProcessorCount;
    facts.major = properties.major;
    facts.minor = properties.minor;
    devices.count = i + 1;
  }
  return devices;
}

/// The devices of this process. If CUDA fails to answer, there are none, and the next call asks
/// again.
const Devices& devices() noexcept try {
  static const Devices found = find_devices();
  return found;
} catch (cudaError_t) {
  static const Devices none;
  return none;
}

}  // namespace

int32_t num_devices() noexcept { return devices().count; }

const DeviceFacts& device_facts(int32_t device) noexcept {
  return devices().facts[static_cast<size_t>(device)];
}

Status cuda_error(const char* call, int code) noexcept {
  static_cast<void>(cudaGetLastError());
  const bool no_memory = code == cudaErrorMemoryAllocation;
  return error(no_memory ? StatusCode::kOutOfMemory : StatusCode::kCudaError,
               "%s: expected success, got %s", call,
               cudaGetErrorString(static_cast<cudaError_t>(code)));
}

DeviceGuard::DeviceGuard(int32_t device) noexcept {
  int current = -1;
  cudaError_t code = cudaGetDevice(&current);
  if (code != cudaSuccess) {
    status_ = cuda_error("cudaGetDevice", code);
    return;
  }
  if (current == device) return;
  code = cudaSetDevice(device);
  if (code != cudaSuccess) {
    status_ = cuda_error("cudaSetDevice", code);
    return;
  }
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) succeeded(cudaSetDevice(previous_));
}

ApartFromCaptures::ApartFromCaptures() noexcept {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  has_changed_ = succeeded(cudaThreadExchangeStreamCaptureMode(&mode));
  mode_ = mode;
}

ApartFromCaptures::~ApartFromCaptures() {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_);
  if (has_changed_) succeeded(cudaThreadExchangeStreamCaptureMode(&mode));
}

Status is_capturing(Stream stream, bool* capturing) noexcept {
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  const cudaError_t code = cudaStreamIsCapturing(stream, &state);
  if (code == cudaErrorStreamCaptureImplicit) {
    static_cast<void>(cudaGetLastError());
    *capturing = true;
    return {};
  }
  if (code != cudaSuccess) return cuda_error("cudaStreamIsCapturing", code);
  *capturing = state != cudaStreamCaptureStatusNone;
  return {};
}

}  // namespace flashplan::cuda
