// SPDX-License-Identifier: Apache-2.0
#include "bindings/xla/xla_call.h"

#include <cstring>

#include "common/error.h"

namespace flashplan {
namespace {

/// Finds the DType for a dtype of XLA. Returns false if there is none.
bool find_dtype(int32_t dtype, DType* found) noexcept {
  switch (dtype) {
    case xla::kF32: return *found = DType::kFloat32, true;
    case xla::kF16: return *found = DType::kFloat16, true;
    case xla::kBF16: return *found = DType::kBFloat16, true;
    case xla::kF8E4M3FN: return *found = DType::kFloat8E4M3, true;
    case xla::kF8E5M2: return *found = DType::kFloat8E5M2, true;
    case xla::kS32: return *found = DType::kInt32, true;
    case xla::kS64: return *found = DType::kInt64, true;
    case xla::kU8: return *found = DType::kFp8DsMla, true;  // bytes: JAX has no fp8_ds_mla
    case xla::kU32: return *found = DType::kUInt32, true;
    default: return false;
  }
}

/// The code of absl::Status, which XLA uses, for a StatusCode.
int32_t error_code(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kInvalidType: return 3;   // INVALID_ARGUMENT
    case StatusCode::kOutOfMemory: return 8;   // RESOURCE_EXHAUSTED
    case StatusCode::kNotReady: return 9;      // FAILED_PRECONDITION
    case StatusCode::kUnsupported: return 12;  // UNIMPLEMENTED
    default: return 13;                        // INTERNAL
  }
}

}  // namespace

xla::Error* to_xla_error(const Status& status, const xla::Api& api) noexcept {
  if (status.ok()) return nullptr;
  xla::CreateError create = {sizeof(create), nullptr, status.message, error_code(status.code)};
  return api.create_error(&create);
}

bool told_metadata(const xla::Call& call) noexcept {
  for (xla::Extension* e = call.extensions; e != nullptr; e = e->next) {
    if (e->type != xla::kMetadataExtension) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(e)->metadata;
    metadata.version.major_version = xla::kMajorVersion;
    metadata.version.minor_version = xla::kMinorVersion;
    metadata.traits = 0;
    return true;
  }
  return false;
}

Status XlaCall::begin() noexcept {
  xla::GetDevice device = {sizeof(device), nullptr, call_.context, 0};
  if (call_.api->struct_size < sizeof(xla::Api) || call_.api->get_device(&device) != nullptr) {
    return error(StatusCode::kUnsupported, "device: expected one from XLA, got none");
  }
  device_number_ = device.device;
  if (device_.type == DeviceType::kCpu) return {};
  xla::GetStream stream = {sizeof(stream), nullptr, call_.context, nullptr};
  if (call_.api->get_stream(&stream) != nullptr) {
    return error(StatusCode::kUnsupported, "stream: expected one from XLA, got none");
  }
  stream_ = static_cast<Stream>(stream.stream);
  device_.index = device.device;
  return {};
}

Status XlaCall::buffer(const xla::Buffers& buffers, int64_t index,
                       TensorView* view) const noexcept {
  if (index >= buffers.count || buffers.types[index] != xla::kBuffer) {
    return error(StatusCode::kInvalidArgument, "call: expected more than %lld arrays, got no more",
                 static_cast<long long>(index));
  }
  const auto& buffer = *static_cast<const xla::Buffer*>(buffers.values[index]);
  if (!find_dtype(buffer.dtype, &view->dtype)) {
    return error(StatusCode::kInvalidType,
                 "call: expected arrays of dtypes that attention takes, got XLA's %d in place %lld",
                 buffer.dtype, static_cast<long long>(index));
  }
  if (buffer.rank < 1 || buffer.rank > kMaxRank) {
    return error(StatusCode::kInvalidArgument,
                 "call: expected arrays of 1 to %d dimensions, got %lld in place %lld", kMaxRank,
                 static_cast<long long>(buffer.rank), static_cast<long long>(index));
  }
  view->data = buffer.data;
  view->device = device_;
  view->rank = static_cast<int32_t>(buffer.rank);
  int64_t stride = 1;
  for (int32_t d = view->rank - 1; d >= 0; --d) {
    view->shape[d] = buffer.dims[d];
    view->stride[d] = stride;
    stride *= buffer.dims[d];
  }
  return {};
}

Status XlaCall::argument(TensorView* view) noexcept {
  view->read_only = true;
  return buffer(call_.arguments, num_arguments_++, view);
}

Status XlaCall::result(TensorView* view) noexcept {
  return buffer(call_.results, num_results_++, view);
}

Status XlaCall::scalar(const char* name, int32_t dtype, void* value, size_t size) const noexcept {
  const xla::Attributes& all = call_.attributes;
  for (int64_t i = 0; i < all.count; ++i) {
    const xla::Text& text = *all.names[i];
    if (text.size != std::strlen(name) || std::memcmp(text.data, name, text.size) != 0) continue;
    const auto& given = *static_cast<const xla::Scalar*>(all.values[i]);
    if (all.types[i] != xla::kScalar || given.dtype != dtype) break;
    std::memcpy(value, given.value, size);
    return {};
  }
  return error(StatusCode::kInvalidArgument,
               "%s: expected an attribute of XLA's dtype %d, got none", name, dtype);
}

Status XlaCall::attribute(const char* name, int64_t* value) const noexcept {
  return scalar(name, xla::kS64, value, sizeof(*value));
}

Status XlaCall::attribute(const char* name, float* value) const noexcept {
  return scalar(name, xla::kF32, value, sizeof(*value));
}

}  // namespace flashplan
