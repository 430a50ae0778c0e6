// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace flashplan::cuda {

/// The driver's function of this name, which CUDA 12.0 has already; null if the driver has none.
/// The library does not link the driver, so that it loads where there is none.
void* driver_function(const char* name) noexcept;

}  // namespace flashplan::cuda
