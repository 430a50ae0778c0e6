// SPDX-License-Identifier: Apache-2.0
// What tests of plans on the fake runtime share: two kernels that are never run, and a stream.
// Include it from one file of each test program: it defines the list of kernels.
#pragma once

#include <vector>

#include "check.h"
#include "cpp/fake_kernels.h"
#include "fake_cuda.h"
#include "flashplan/flashplan.h"
#include "kernels/kernel_list.h"

namespace flashplan::cuda {

/// One for few rows, which has chunks, and one for many, which cuts nothing. So plans have both.
std::span<const Kernel> kernels() noexcept {
  static const std::vector<Kernel> all = [] {
    static const char code[4] = {};
    Kernel few = test::fake_kernel("sm80_bf16_d128", {90, 'a'});
    few.code = {nullptr, code, code + 1, nullptr};
    Kernel many = test::fake_kernel("sm90_bf16_d128", {90, 'a'});
    many.family = &kSm90Family;
    many.geometry.tile_kv = 128;
    many.geometry.queues_per_processor = 1;
    many.geometry.uses_tensor_maps = true;
    many.rotating_geometry = many.geometry;
    many.tuning = sm90_tuning(128);
    many.code = {nullptr, code + 2, code + 3, nullptr};
    return std::vector<Kernel>{few, many};
  }();
  return all;
}

}  // namespace flashplan::cuda

namespace flashplan::test {

constexpr Device kGpu = {DeviceType::kCuda, 1};

/// Of kGpu, while another device is the current one.
class TestStream {
 public:
  TestStream() {
    CHECK(cudaSetDevice(kGpu.index) == cudaSuccess);
    CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaSetDevice(0) == cudaSuccess);
  }
  ~TestStream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  operator Stream() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace flashplan::test
