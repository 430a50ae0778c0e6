// SPDX-License-Identifier: Apache-2.0
// The functions of the runtime and the driver.
#include <cuda.h>

#include <cstring>
#include <utility>

#include "model.h"

using namespace fake_cuda;

/// The beginning of the functions of the runtime: takes the lock, and returns if the call fails.
#define BEGIN(name)                           \
  const std::scoped_lock lock(state().mutex); \
  if (const cudaError_t failed = result_of(name); failed != cudaSuccess) return failed

extern "C" {

// It gives the error of an earlier call, and is no call that can fail itself.
cudaError_t cudaGetLastError() { return std::exchange(thread.last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorMemoryAllocation ? "out of memory" : "unknown error";
}

cudaError_t cudaGetDeviceCount(int* count) {
  BEGIN("cudaGetDeviceCount");
  *count = kNumDevices;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  BEGIN("cudaGetDeviceProperties");
  *properties = {"Fake GPU", kNumProcessors, 9, 0};
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  BEGIN("cudaGetDevice");
  *device = thread.device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  const std::scoped_lock lock(state().mutex);
  const cudaError_t result = result_of("cudaSetDevice");
  if (result == cudaSuccess) thread.device = device;
  state().failed_to_restore |= result != cudaSuccess && device == 0;  // 0: the tests' own
  return result;
}

cudaError_t cudaMalloc(void** data, std::size_t size) {
  BEGIN("cudaMalloc");
  std::vector<char> memory(size + 1, '\x7f');
  *data = memory.data();
  state().last_use.erase(memory.data());
  state().device_memory.emplace(memory.data(), std::move(memory));
  return cudaSuccess;
}

// A call that frees does so even if it fails: CUDA then reports an error of earlier work.
cudaError_t cudaFree(void* data) {
  const std::scoped_lock lock(state().mutex);
  wait_for_all();
  if (state().device_memory.erase(static_cast<char*>(data)) != 1) {
    mistake("cudaFree: there is no such memory");
  }
  return result_of("cudaFree");
}

cudaError_t cudaHostAlloc(void** data, std::size_t size, unsigned) {
  BEGIN("cudaHostAlloc");
  std::vector<char> memory(size + 1);
  *data = memory.data();
  state().pinned_memory.emplace(memory.data(), std::move(memory));
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* data) {
  const std::scoped_lock lock(state().mutex);
  for (const PinnedCopy& copy : state().copies) {
    if (memory_of(state().pinned_memory, copy.from) == data) {
      mistake("cudaFreeHost: a copy from the memory is under way");
    }
  }
  if (state().pinned_memory.erase(static_cast<char*>(data)) != 1) {
    mistake("cudaFreeHost: there is no such memory");
  }
  return result_of("cudaFreeHost");
}

cudaError_t cudaMemset(void* data, int value, std::size_t size) {
  BEGIN("cudaMemset");
  CUstream_st* stream = &state().legacy;
  use(data, stream, begin_operation(stream), "cudaMemset");
  std::memset(data, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind kind,
                            cudaStream_t on) {
  BEGIN("cudaMemcpyAsync");
  CUstream_st* stream = checked(on);
  const Operation operation = begin_operation(stream);
  if (kind == cudaMemcpyDeviceToHost) {
    std::memcpy(to, from, size);
    return cudaSuccess;
  }
  if (on != nullptr && stream->device != thread.device)
    mistake("cudaMemcpyAsync: a stream of another device");
  use(to, stream, operation, "cudaMemcpyAsync");
  const auto* first = static_cast<const char*>(from);
  if (memory_of(state().pinned_memory, from) == nullptr) mistake("the memory is not pinned");
  state().copies.push_back(
      {operation, first, static_cast<char*>(to), std::vector<char>(first, first + size)});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  BEGIN("cudaEventCreateWithFlags");
  *event = new CUevent_st;
  state().events.insert(*event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::scoped_lock lock(state().mutex);
  if (check_event(event)) {
    state().events.erase(event);
    delete event;
  }
  return result_of("cudaEventDestroy");
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t on) {
  BEGIN("cudaEventRecord");
  CUstream_st* stream = checked(on);
  if (check_event(event)) event->after = stream->after;
  return cudaSuccess;
}

// Every second query comes before the work has ended, if there is any.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  BEGIN("cudaEventQuery");
  if (!check_event(event)) return cudaErrorInvalidValue;
  state().is_query_late = !state().is_query_late;
  if (state().is_query_late && !event->after.empty()) {
    thread.last_error = cudaErrorNotReady;
    return cudaErrorNotReady;
  }
  wait_for(event->after);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  BEGIN("cudaEventSynchronize");
  if (check_event(event)) wait_for(event->after);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  BEGIN("cudaStreamCreateWithFlags");
  *stream = new CUstream_st;
  (*stream)->device = thread.device;
  (*stream)->number = ++state().last_stream;
  state().streams.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::scoped_lock lock(state().mutex);
  wait_for(checked(stream)->after);
  state().streams.erase(stream);
  delete stream;
  return result_of("cudaStreamDestroy");
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  BEGIN("cudaStreamSynchronize");
  wait_for(checked(stream)->after);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  BEGIN("cudaStreamWaitEvent");
  if (check_event(event)) merge(event->after, &checked(stream)->after);
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* number) {
  BEGIN("cudaStreamGetId");
  *number = checked(stream)->number;
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  BEGIN("cudaStreamGetDevice");
  *device = stream == nullptr ? thread.device : checked(stream)->device;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  BEGIN("cudaStreamIsCapturing");
  *status =
      checked(stream)->is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const std::scoped_lock lock(state().mutex);
  const cudaError_t result = result_of("cudaThreadExchangeStreamCaptureMode");
  const bool restores = *mode == cudaStreamCaptureModeGlobal;  // the tests' own
  if (result == cudaSuccess) std::swap(*mode, thread.mode);
  state().failed_to_restore |= result != cudaSuccess && restores;
  return result;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  BEGIN("cudaFuncGetAttributes");
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  BEGIN("cudaFuncSetAttribute");
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  BEGIN("cudaLaunchKernelExC");
  CUstream_st* stream = checked(config->stream);
  if (function == nullptr) mistake("cudaLaunchKernelExC: there is no such kernel");
  if (stream->device != thread.device) mistake("cudaLaunchKernelExC: a stream of another device");
  if (stream->is_capturing) return cudaSuccess;
  const Operation operation = begin_operation(stream);
  if (state().memory_of_launch == nullptr) return cudaSuccess;
  const void* memory = state().memory_of_launch(arguments);
  if (memory != nullptr) use(memory, stream, operation, "cudaLaunchKernelExC");
  return cudaSuccess;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, void*, void**, unsigned, void*,
                                void**, unsigned) {
  BEGIN("cudaLibraryLoadData");
  *library = reinterpret_cast<cudaLibrary_t>(&state());
  ++state().others.libraries;
  return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char*) {
  BEGIN("cudaLibraryGetKernel");
  *kernel = reinterpret_cast<cudaKernel_t>(&state());
  return cudaSuccess;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t) {
  const std::scoped_lock lock(state().mutex);
  --state().others.libraries;
  return result_of("cudaLibraryUnload");
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  BEGIN("cudaGetDriverEntryPointByVersion");
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*,
                                const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const std::scoped_lock lock(state().mutex);
  *map = {};
  return fails_now("cuTensorMapEncodeTiled") ? 1 : CUDA_SUCCESS;
}

}  // extern "C"
