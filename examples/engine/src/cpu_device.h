// SPDX-License-Identifier: Apache-2.0
// A device that computes on the CPU, in float32. The work of each call is done when it returns.
#pragma once

#include <deque>
#include <vector>

#include "device.h"
#include "engine/engine.h"
#include "products.h"

namespace engine {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const Options& options);

  flashplan::Device place() const override { return {}; }
  flashplan::DType dtype() const override { return flashplan::DType::kFloat32; }
  flashplan::Stream stream() const override { return nullptr; }
  std::shared_ptr<void> allocate(std::size_t bytes) override;
  std::shared_ptr<const void> place_weights(const std::shared_ptr<const float>& values,
                                            int64_t count) override;
  void multiply(const Product& product) override;
  void copy(void* to, const void* from, std::size_t bytes) override;
  void copy_on_device(void* to, const void* from, std::size_t bytes) override {
    copy(to, from, bytes);
  }
  std::byte* stage(std::size_t bytes) override;
  void send(void* to, std::size_t bytes, bool has_paused) override;
  void fetch(const void* from, std::size_t bytes) override;
  const std::byte* wait() override;

 private:
  Multiply multiply_;
  std::vector<std::byte> staged_;
  std::deque<std::vector<std::byte>> fetched_;  // the oldest first
  std::vector<std::byte> waited_for_;
};

}  // namespace engine
