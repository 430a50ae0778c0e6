// SPDX-License-Identifier: Apache-2.0
#include "cuda/memory.h"

#include "common/error.h"
#include "cuda/device.h"
#include "cuda/runtime.h"

namespace flashplan::cuda {

Status allocate(int32_t device, std::size_t size, void** data) noexcept {
  const DeviceGuard guard(device);
  FLASHPLAN_RETURN_IF_ERROR(guard.status());
  const ApartFromCaptures apart;
  const cudaError_t code = cudaMalloc(data, size);
  if (succeeded(code)) return {};
  if (code != cudaErrorMemoryAllocation) return cuda_error("cudaMalloc", code);
  return error(StatusCode::kOutOfMemory, "workspace: expected %zu free bytes on cuda:%d, got fewer",
               size, device);
}

void release(int32_t device, void* data) noexcept {
  if (data == nullptr) return;
  const DeviceGuard guard(device);
  const ApartFromCaptures apart;
  succeeded(cudaFree(data));
}

Status create_stream(int32_t device, Stream* stream) noexcept {
  const DeviceGuard guard(device);
  FLASHPLAN_RETURN_IF_ERROR(guard.status());
  FLASHPLAN_CUDA_CALL(cudaStreamCreateWithFlags, stream, cudaStreamNonBlocking);
  return {};
}

Status synchronize(int32_t device, Stream stream) noexcept {
  const DeviceGuard guard(device);
  FLASHPLAN_RETURN_IF_ERROR(guard.status());
  FLASHPLAN_CUDA_CALL(cudaStreamSynchronize, stream);
  return {};
}

Status copy_to_host(int32_t device, const void* from, std::size_t size, void* to,
                    Stream stream) noexcept {
  const DeviceGuard guard(device);
  FLASHPLAN_RETURN_IF_ERROR(guard.status());
  const ApartFromCaptures apart;
  FLASHPLAN_CUDA_CALL(cudaMemcpyAsync, to, from, size, cudaMemcpyDeviceToHost, stream);
  FLASHPLAN_CUDA_CALL(cudaStreamSynchronize, stream);
  return {};
}

}  // namespace flashplan::cuda
