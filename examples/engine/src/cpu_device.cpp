// SPDX-License-Identifier: Apache-2.0
#include "cpu_device.h"

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace engine {

CpuDevice::CpuDevice(const Options& options)
    : multiply_(options.batch_invariant || options.products == Products::kRowByRow
                    ? multiply_row_by_row
                    : multiply_fastest) {}

std::shared_ptr<void> CpuDevice::allocate(std::size_t bytes) {
  constexpr std::align_val_t kAlignment{flashplan::kWorkspaceAlignment};
  const std::shared_ptr<void> memory(::operator new(bytes, kAlignment, std::nothrow),
                                     [](void* pointer) { ::operator delete(pointer, kAlignment); });
  if (memory == nullptr) {
    throw std::runtime_error("no memory for " + std::to_string(bytes) + " bytes");
  }
  std::memset(memory.get(), 0, bytes);
  return memory;
}

std::shared_ptr<const void> CpuDevice::place_weights(const std::shared_ptr<const float>& values,
                                                     int64_t /*count*/) {
  return values;
}

void CpuDevice::multiply(const Product& p) {
  multiply_(static_cast<const float*>(p.x), p.m, p.k, static_cast<const float*>(p.w), p.n,
            static_cast<float*>(p.y), p.y_stride);
}

void CpuDevice::copy(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

std::byte* CpuDevice::stage(std::size_t bytes) {
  staged_.resize(bytes);
  return staged_.data();
}

void CpuDevice::send(void* to, std::size_t bytes, bool /*has_paused*/) {
  std::memcpy(to, staged_.data(), bytes);
}

void CpuDevice::fetch(const void* from, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(from);
  fetched_.emplace_back(begin, begin + bytes);
}

const std::byte* CpuDevice::wait() {
  waited_for_ = std::move(fetched_.front());
  fetched_.pop_front();
  return waited_for_.data();
}

}  // namespace engine
