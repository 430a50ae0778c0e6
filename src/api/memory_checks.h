// SPDX-License-Identifier: Apache-2.0
// Where the elements of tensors lie in memory: only pointers, shapes and strides are looked at, so
// the checks hold for tensors on a GPU too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan {

/// A named argument and how it is used.
struct TensorArgument {
  const char* name;
  const TensorView& view;
  bool written = false;
};

/// Whether no dimension is 0.
bool has_elements(const TensorView& view) noexcept;

/// Of a view of known dtype and rank: sizes >= 0 and, where there are elements, a pointer that is
/// neither null nor misaligned, addresses that do not wrap round, and, for what is written, memory
/// that may be written and is not shared between elements.
Status check_memory(const TensorArgument& argument) noexcept;

/// Whether a view is in row-major order, gaps allowed, in memory as check_memory() wants it, and
/// contiguous in the last dimension. Seen in one pass: most tensors are, and need no other check.
bool is_plain(const TensorArgument& argument) noexcept;

/// Refuses a written argument that shares an element's memory with another argument. All have
/// passed check_shape(); those not given are skipped. Tensors that lie in one another's gaps, as
/// the halves of a combined cache do, are apart.
Status check_apart(const TensorArgument& written, const TensorArgument& other) noexcept;

/// The same for all pairs.
Status check_apart(std::span<const TensorArgument> arguments) noexcept;

/// Memory without a dtype, as a view of bytes.
TensorView bytes_view(void* data, std::size_t size, Device device) noexcept;

}  // namespace flashplan
