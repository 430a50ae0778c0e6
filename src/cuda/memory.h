// SPDX-License-Identifier: Apache-2.0
// Device memory and streams for callers who give none, and copies to the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan::cuda {

/// Allocates `size` bytes of device memory, aligned to 256 bytes.
///   kOutOfMemory  the device has fewer free bytes
Status allocate(int32_t device, std::size_t size, void** data) noexcept;
/// Frees memory after the device is done with it. Null is allowed.
void release(int32_t device, void* data) noexcept;

/// Creates a stream that is not synchronised with the legacy default stream.
Status create_stream(int32_t device, Stream* stream) noexcept;
Status synchronize(int32_t device, Stream stream) noexcept;

/// Copies `size` bytes from the device to host memory, after the work on `stream`. Returns when the
/// copy is done.
Status copy_to_host(int32_t device, const void* from, std::size_t size, void* to,
                    Stream stream) noexcept;

}  // namespace flashplan::cuda
