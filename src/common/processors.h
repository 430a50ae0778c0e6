// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashplan {

/// CPUs this process may run on (its affinity mask), at least 1. Asked once.
int32_t num_processors() noexcept;

}  // namespace flashplan
