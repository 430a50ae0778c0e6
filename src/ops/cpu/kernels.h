// SPDX-License-Identifier: Apache-2.0
// What kernels.cpp exports once per instruction set it is compiled for: each operator on rows
// [begin, end).
#pragma once

#include <cstdint>

#include "flashplan/sampling.h"
#include "ops/params.h"

namespace flashplan::cpu {

struct OperatorKernels {
  void (*norm)(const NormParams& params, int32_t begin, int32_t end) noexcept;
  void (*gated_activation)(const ActivationParams& params, int32_t begin, int32_t end) noexcept;
  void (*rope)(const RopeParams& params, int32_t begin, int32_t end) noexcept;
  void (*softmax)(const SoftmaxParams& params, int32_t begin, int32_t end) noexcept;
  void (*append)(const AppendParams& params, int32_t begin, int32_t end) noexcept;
  void (*rope_append)(const RopeAppendParams& params, int32_t begin, int32_t end) noexcept;
};

/// What a row of logits gave.
struct SampleResult {
  int32_t id = -1;
  float logprob = 0.0F;
  SampleError error = SampleError::kNone;
};

/// From kernels_sampling.cpp, which is compiled without contraction.
using SampleRow = SampleResult (*)(const SampleParams& params, int32_t row) noexcept;

namespace baseline {
const OperatorKernels& operator_kernels() noexcept;
SampleResult sample_row(const SampleParams& params, int32_t row) noexcept;
}  // namespace baseline
namespace avx2 {
const OperatorKernels& operator_kernels() noexcept;
SampleResult sample_row(const SampleParams& params, int32_t row) noexcept;
}  // namespace avx2
namespace avx512 {
const OperatorKernels& operator_kernels() noexcept;
SampleResult sample_row(const SampleParams& params, int32_t row) noexcept;
}  // namespace avx512

}  // namespace flashplan::cpu
