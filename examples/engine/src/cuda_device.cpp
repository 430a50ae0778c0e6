// SPDX-License-Identifier: Apache-2.0
#include "cuda_device.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "cuda_call.h"
#include "open_device.h"

namespace engine {

namespace {

/// Rounds to nearest, ties to even. Does not handle NaN and infinity, since weights are finite.
uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace

std::unique_ptr<Device> open_cuda_device(const Options& options) {
  return std::make_unique<CudaDevice>(options);
}

CudaDevice::CudaDevice(const Options& options) : has_graphs_(options.has_graphs) {
  call(cudaSetDevice(0), "cudaSetDevice");
  call(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  for (Slot& slot : slots_) {
    call(cudaEventCreateWithFlags(&slot.sent, cudaEventDisableTiming), "cudaEventCreate");
    call(cudaEventCreate(&slot.begin), "cudaEventCreate");
    call(cudaEventCreate(&slot.end), "cudaEventCreate");
  }
  products_ = std::make_unique<CublasLt>(stream_);
}

CudaDevice::~CudaDevice() {
  synchronize();
  products_.reset();
  for (auto& [key, recorded] : recorded_) {
    if (recorded.graph != nullptr) cudaGraphExecDestroy(recorded.graph);
  }
  for (Slot& slot : slots_) {
    cudaFreeHost(slot.inputs.memory);
    cudaFreeHost(slot.outputs.memory);
    for (cudaEvent_t event : {slot.sent, slot.begin, slot.end}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

std::shared_ptr<void> CudaDevice::allocate(std::size_t bytes) {
  void* memory = nullptr;
  call(cudaMalloc(&memory, bytes), "cudaMalloc");
  std::shared_ptr<void> owner(memory, [](void* pointer) { cudaFree(pointer); });
  call(cudaMemsetAsync(memory, 0, bytes, stream_), "cudaMemsetAsync");
  return owner;
}

std::shared_ptr<const void> CudaDevice::place_weights(const std::shared_ptr<const float>& values,
                                                      int64_t count) {
  std::vector<uint16_t> narrow(static_cast<std::size_t>(count));
  std::transform(values.get(), values.get() + count, narrow.begin(), to_bfloat16);
  const std::size_t bytes = narrow.size() * sizeof(uint16_t);
  std::shared_ptr<void> memory = allocate(bytes);
  copy(memory.get(), narrow.data(), bytes);
  return memory;
}

void CudaDevice::multiply(const Product& product) {
  Product padded = product;
  padded.m = padded_rows(product.m);
  products_->multiply(padded);
}

int64_t CudaDevice::padded_rows(int64_t m) const {
  // Choosing an algorithm for a shape takes time. Numbers of rows are rounded up, so that there are
  // few shapes.
  if (m <= 8) return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(m)));
  const int64_t unit = m <= 64 ? 8 : m <= 256 ? 16 : 64;
  return (m + unit - 1) / unit * unit;
}

void CudaDevice::copy(void* to, const void* from, std::size_t bytes) {
  call(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  call(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

void CudaDevice::copy_on_device(void* to, const void* from, std::size_t bytes) {
  call(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
}

std::byte* CudaDevice::stage(std::size_t bytes) {
  Slot& next = slot(num_sent_);
  call(cudaEventSynchronize(next.sent), "cudaEventSynchronize");
  grow(&next.inputs, bytes);
  return static_cast<std::byte*>(next.inputs.memory);
}

void CudaDevice::send(void* to, std::size_t bytes, bool has_paused) {
  Slot& next = slot(num_sent_++);
  next.has_paused = has_paused;
  call(cudaEventRecord(next.begin, stream_), "cudaEventRecord");
  call(cudaMemcpyAsync(to, next.inputs.memory, bytes, cudaMemcpyHostToDevice, stream_),
       "cudaMemcpyAsync");
  call(cudaEventRecord(next.sent, stream_), "cudaEventRecord");
}

void CudaDevice::fetch(const void* from, std::size_t bytes) {
  Slot& last = slot(num_fetched_++);
  grow(&last.outputs, bytes);
  call(cudaMemcpyAsync(last.outputs.memory, from, bytes, cudaMemcpyDeviceToHost, stream_),
       "cudaMemcpyAsync");
  call(cudaEventRecord(last.end, stream_), "cudaEventRecord");
}

const std::byte* CudaDevice::wait() {
  const std::size_t step = num_waited_for_++;
  Slot& oldest = slot(step);
  call(cudaEventSynchronize(oldest.end), "cudaEventSynchronize");
  float milliseconds = 0;
  call(cudaEventElapsedTime(&milliseconds, oldest.begin, oldest.end), "cudaEventElapsedTime");
  times_.busy += 1e-3 * static_cast<double>(milliseconds);
  if (step > 0 && !oldest.has_paused) {
    call(cudaEventElapsedTime(&milliseconds, slot(step - 1).end, oldest.begin),
         "cudaEventElapsedTime");
    times_.idle += 1e-3 * static_cast<double>(milliseconds);
  }
  return static_cast<const std::byte*>(oldest.outputs.memory);
}

void CudaDevice::synchronize() noexcept {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
}

// --8<-- [start:record]
void CudaDevice::record(int32_t key, const std::function<void()>& work) {
  Recorded& recorded = recorded_[key];
  const int32_t num_calls = recorded.num_calls++;
  // The first call loads kernels and chooses algorithms, which can not be captured.
  if (!has_graphs_ || num_calls == 0) return work();
  if (recorded.graph == nullptr) recorded.graph = capture(work);
  call(cudaGraphLaunch(recorded.graph, stream_), "cudaGraphLaunch");
}
// --8<-- [end:record]

cudaGraphExec_t CudaDevice::capture(const std::function<void()>& work) {
  call(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream_, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  call(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  call(error, "cudaGraphInstantiate");
  return executable;
}

void CudaDevice::grow(Pinned* pinned, std::size_t bytes) {
  if (pinned->bytes >= bytes) return;
  cudaFreeHost(pinned->memory);
  *pinned = {};
  call(cudaMallocHost(&pinned->memory, bytes), "cudaMallocHost");
  pinned->bytes = bytes;
}

}  // namespace engine
