// SPDX-License-Identifier: Apache-2.0
// Device memory and streams for callers that have none of their own: the Python bindings.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashplan/status.h"
#include "flashplan/tensor.h"

namespace flashplan::cuda {

/// `size` bytes, aligned to 256.
///   kOutOfMemory  the device has no more
Status allocate(int32_t device, std::size_t size, void** data) noexcept;
/// Waits for the device. Null is allowed.
void release(int32_t device, void* data) noexcept;

/// A stream that neither waits for the legacy default stream nor is waited for.
Status create_stream(int32_t device, Stream* stream) noexcept;
Status synchronize(int32_t device, Stream stream) noexcept;

}  // namespace flashplan::cuda
