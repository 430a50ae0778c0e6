// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 matrices by cuBLASLt, whose library is loaded when the program runs.
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "device.h"

namespace engine {

class CublasLt {
 public:
  /// Throws std::runtime_error if the loader finds neither libcublasLt.so.13 nor .12, or if the
  /// environment variable ENGINE_CUBLASLT has a path at which there is no such library.
  explicit CublasLt(cudaStream_t stream);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  /// Begins a product of bfloat16 on the stream. The first product of a shape chooses the
  /// algorithm. With few rows it times several, so the stream must not be captured then.
  void multiply(const Product& product);

 private:
  struct Functions;
  struct Shape {
    int64_t m, n, k, y_stride;
    flashplan::DType y_dtype;
    auto operator<=>(const Shape&) const = default;
  };
  struct Choice;

  Choice& choose(const Shape& shape, const Product& product);
  void run(const Choice& choice, const Product& product);
  /// The least time of several runs, in milliseconds, each with an empty cache of the GPU.
  float time_of(const Choice& choice, const Product& product);
  void check(int32_t status, const char* function) const;

  cudaStream_t stream_;
  std::unique_ptr<Functions> functions_;
  void* library_ = nullptr;
  void* handle_ = nullptr;
  void* workspace_ = nullptr;
  void* flushed_ = nullptr;  // memory larger than the L2 cache, written to flush it
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::map<Shape, std::unique_ptr<Choice>> choices_;
};

}  // namespace engine
