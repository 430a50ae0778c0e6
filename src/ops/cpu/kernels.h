// SPDX-License-Identifier: Apache-2.0
// What kernels.cpp exports once per instruction set it is compiled for: each operator on rows
// [begin, end).
#pragma once

#include <cstdint>

#include "ops/params.h"

namespace flashplan::cpu {

struct OperatorKernels {
  void (*norm)(const NormParams& params, int32_t begin, int32_t end) noexcept;
  void (*gated_activation)(const ActivationParams& params, int32_t begin, int32_t end) noexcept;
};

namespace baseline {
const OperatorKernels& operator_kernels() noexcept;
}
namespace avx2 {
const OperatorKernels& operator_kernels() noexcept;
}
namespace avx512 {
const OperatorKernels& operator_kernels() noexcept;
}

}  // namespace flashplan::cpu
