// SPDX-License-Identifier: Apache-2.0
// A device that computes on the first GPU, in bfloat16. Calls return while the GPU still works,
// where device.h allows it.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <map>
#include <memory>

#include "cublaslt.h"
#include "device.h"
#include "engine/engine.h"

namespace engine {

class CudaDevice final : public Device {
 public:
  /// Throws std::runtime_error if there is no GPU, or no cuBLASLt.
  explicit CudaDevice(const Options& options);
  ~CudaDevice() override;

  flashplan::Device place() const override { return {flashplan::DeviceType::kCuda, 0}; }
  flashplan::DType dtype() const override { return flashplan::DType::kBFloat16; }
  flashplan::Stream stream() const override { return stream_; }
  std::shared_ptr<void> allocate(std::size_t bytes) override;
  std::shared_ptr<const void> place_weights(const std::shared_ptr<const float>& values,
                                            int64_t count) override;
  void multiply(const Product& product) override;
  int64_t padded_rows(int64_t m) const override;
  void copy(void* to, const void* from, std::size_t bytes) override;
  void copy_on_device(void* to, const void* from, std::size_t bytes) override;
  std::byte* stage(std::size_t bytes) override;
  void send(void* to, std::size_t bytes, bool has_paused) override;
  void fetch(const void* from, std::size_t bytes) override;
  const std::byte* wait() override;
  void synchronize() noexcept override;
  bool has_graphs() const override { return has_graphs_; }
  void record(int32_t key, const std::function<void()>& work) override;
  DeviceTimes times() const override { return times_; }

 private:
  /// Host memory that the GPU copies to or from.
  struct Pinned {
    void* memory = nullptr;
    std::size_t bytes = 0;
  };
  /// The buffers of a step for what the host sends and gets, and events at its begin and end.
  struct Slot {
    Pinned inputs, outputs;
    cudaEvent_t sent = nullptr, begin = nullptr, end = nullptr;
    bool has_paused = false;
  };
  struct Recorded {
    int32_t num_calls = 0;
    cudaGraphExec_t graph = nullptr;
  };

  /// Two steps are under way, the host fills a third one, and still asks for the end of a fourth.
  static constexpr std::size_t kSlots = 4;

  Slot& slot(std::size_t step) { return slots_[step % kSlots]; }
  static void grow(Pinned* pinned, std::size_t bytes);
  cudaGraphExec_t capture(const std::function<void()>& work);

  bool has_graphs_;
  cudaStream_t stream_ = nullptr;
  std::array<Slot, kSlots> slots_;
  std::size_t num_sent_ = 0, num_fetched_ = 0, num_waited_for_ = 0;  // numbers of steps
  std::map<int32_t, Recorded> recorded_;
  std::unique_ptr<CublasLt> products_;
  DeviceTimes times_;
};

}  // namespace engine
