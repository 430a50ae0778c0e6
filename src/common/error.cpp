// SPDX-License-Identifier: Apache-2.0
#include "common/error.h"

#include <cstdarg>
#include <cstdio>

namespace flashplan {

Status error(StatusCode code, const char* format, ...) noexcept {
  Status status;
  status.code = code;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.message, sizeof(status.message), format, arguments);
  va_end(arguments);
  return status;
}

const char* to_string(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk: return "kOk";
    case StatusCode::kInvalidArgument: return "kInvalidArgument";
    case StatusCode::kInvalidType: return "kInvalidType";
    case StatusCode::kUnsupported: return "kUnsupported";
    case StatusCode::kNotReady: return "kNotReady";
    case StatusCode::kOutOfMemory: return "kOutOfMemory";
    case StatusCode::kCudaError: return "kCudaError";
  }
  return "unknown";
}

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kFloat8E5M2: return "float8_e5m2";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kUInt32: return "uint32";
    case DType::kFp8DsMla: return "fp8_ds_mla";
  }
  return "an unknown dtype";
}

DeviceName to_string(Device device) noexcept {
  DeviceName name;
  const char* type = device.type == DeviceType::kCpu    ? "cpu"
                     : device.type == DeviceType::kCuda ? "cuda"
                                                        : "an unknown device";
  if (device.type == DeviceType::kCpu && device.index == 0) {
    std::snprintf(name.text, sizeof(name.text), "%s", type);
  } else {
    std::snprintf(name.text, sizeof(name.text), "%s:%d", type, device.index);
  }
  return name;
}

}  // namespace flashplan
