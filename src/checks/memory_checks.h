// SPDX-License-Identifier: Apache-2.0
// Checks of where the elements of tensors lie in memory. They read only pointers, shapes and
// strides, so they work for tensors on a GPU too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// A tensor argument with its name, and whether it is written.
struct TensorArgument {
  const char* name;
  const TensorView& view;
  bool written = false;
};

/// Whether no dimension is 0.
bool has_elements(const TensorView& view) noexcept;

/// Checks a view of known dtype and rank: sizes must be >= 0. If there are elements, the pointer
/// must be neither null nor misaligned, and no element's address may wrap round. A written argument
/// must not be read-only, and no two of its elements may share memory.
Status check_memory(const TensorArgument& argument) noexcept;

/// Whether a view is in row-major order with a contiguous last dimension, and would pass
/// check_memory(). Rows may have gaps between them. Nearly all tensors pass this fast check; only
/// the others need check_memory().
bool is_plain(const TensorArgument& argument) noexcept;

/// Refuses a written argument that shares the memory of an element with another argument. Both must
/// have passed check_shape(). An argument that was not given shares no memory. Tensors that lie in
/// one another's gaps, such as the two halves of a combined cache, do not share memory.
Status check_apart(const TensorArgument& written, const TensorArgument& other) noexcept;

constexpr std::size_t kMostArguments = 20;

/// Calls check_apart() for each pair of arguments of which at least one is written. Takes at most
/// kMostArguments arguments.
Status check_apart(std::span<const TensorArgument> arguments) noexcept;

/// A view of memory as bytes.
TensorView bytes_view(void* data, std::size_t size, Device device) noexcept;

}  // namespace flashplan
