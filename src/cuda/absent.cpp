// SPDX-License-Identifier: Apache-2.0
// Takes the place of the other files in a build without CUDA. Such a build has no devices and no
// kernels, so functions that need a device are never called.
#include "common/error.h"
#include "cuda/compile_variant.h"
#include "cuda/device.h"
#include "cuda/device_schedule.h"
#include "cuda/launch_kernel.h"
#include "cuda/memory.h"
#include "cuda/tensor_maps.h"

namespace flashplan {
namespace {

Status not_built() noexcept {
  return error(StatusCode::kUnsupported, "device: expected cpu (built without CUDA), got cuda");
}

}  // namespace

namespace cuda {

Status prepare(const Kernel& /*kernel*/, bool /*is_compiled_in*/) noexcept { return not_built(); }
Status compile_variant(const AttentionOptions& /*options*/, const RopeTurns* /*rope*/,
                       Kernel* /*kernel*/) noexcept {
  return not_built();
}
Status launch(const Kernel& /*kernel*/, const AttentionParams& /*params*/,
              Stream /*stream*/) noexcept {
  return not_built();
}

TensorMaps encode_tensor_maps(const Kernel& /*kernel*/, const AttentionOptions& /*options*/,
                              const AttentionTensors& /*tensors*/) noexcept {
  return {};
}

int32_t num_devices() noexcept { return 0; }
const DeviceFacts& device_facts(int32_t /*device*/) noexcept {
  static const DeviceFacts none;
  return none;
}
Status cuda_error(const char* /*call*/, int /*code*/) noexcept { return not_built(); }

DeviceGuard::DeviceGuard(int32_t /*device*/) noexcept : status_(not_built()) {}
DeviceGuard::~DeviceGuard() = default;

ApartFromCaptures::ApartFromCaptures() noexcept = default;
ApartFromCaptures::~ApartFromCaptures() = default;

Status is_capturing(Stream /*stream*/, bool* /*capturing*/) noexcept { return not_built(); }

DeviceSchedule::~DeviceSchedule() = default;
Status DeviceSchedule::create(int32_t /*device*/, const ScheduleBounds& /*bounds*/,
                              int32_t /*num_kv_heads*/,
                              std::span<const int32_t> /*num_ctas*/) noexcept {
  return not_built();
}
Status DeviceSchedule::before_upload(Stream /*stream*/, ScheduleMemory* /*memory*/) noexcept {
  return not_built();
}
Status DeviceSchedule::upload(const Schedules& /*schedules*/, Stream /*stream*/) noexcept {
  return not_built();
}
Status DeviceSchedule::before_run(Stream /*stream*/) noexcept { return not_built(); }
Status DeviceSchedule::after_run(Stream /*stream*/) noexcept { return not_built(); }
ScheduleParams DeviceSchedule::schedule(int32_t /*kernel*/) const noexcept { return {}; }
void DeviceSchedule::place(PreparedKv* /*kv*/) const noexcept {}

Status allocate(int32_t /*device*/, std::size_t /*size*/, void** /*data*/) noexcept {
  return not_built();
}
void release(int32_t /*device*/, void* /*data*/) noexcept {}
Status create_stream(int32_t /*device*/, Stream* /*stream*/) noexcept { return not_built(); }
Status synchronize(int32_t /*device*/, Stream /*stream*/) noexcept { return not_built(); }
Status copy_to_host(int32_t /*device*/, const void* /*from*/, std::size_t /*size*/, void* /*to*/,
                    Stream /*stream*/) noexcept {
  return not_built();
}

}  // namespace cuda
}  // namespace flashplan
