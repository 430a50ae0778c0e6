// SPDX-License-Identifier: Apache-2.0
// Device memory and streams for the Python bindings, where the caller gives none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan::cuda {

/// `size` bytes, aligned to 256.
///   kOutOfMemory  the device has no more
Status allocate(int32_t device, std::size_t size, void** data) noexcept;
/// Frees memory after the device is done with it. Null is allowed.
void release(int32_t device, void* data) noexcept;

/// A stream that is not synchronised with the legacy default stream.
Status create_stream(int32_t device, Stream* stream) noexcept;
Status synchronize(int32_t device, Stream stream) noexcept;

}  // namespace flashplan::cuda
