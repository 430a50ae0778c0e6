// SPDX-License-Identifier: Apache-2.0
// Checks that several operators make.
#pragma once

#include "checks/memory_checks.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// Checks that the dtype is float32, float16 or bfloat16.
Status check_wide(const TensorArgument& argument) noexcept;

/// Checks that a number is finite and >= 0.
Status check_not_negative(const char* name, float value) noexcept;

/// Checks the tensor that decides the device and the rows of an operator: [..., n] of rank 1 to 4
/// with fewer than 2^31 rows, on the CPU or on cuda:<index>.
Status check_rows(const TensorArgument& argument) noexcept;

/// Checks that a tensor is on the device of `like` and has its shape, except for the last
/// dimension, which must be `last`.
Status check_rows_like(const TensorArgument& argument, const TensorView& like,
                       int64_t last) noexcept;

/// Whether two views of the same shape and dtype are the same memory in the same order.
bool is_same_view(const TensorView& a, const TensorView& b) noexcept;

/// Refuses an output that shares memory with an input, unless it is that input.
Status check_apart_or_same(const TensorArgument& written, const TensorArgument& other) noexcept;

}  // namespace flashplan
