// SPDX-License-Identifier: Apache-2.0
// Scales of q, k or v, one for each kv head, as kernels read them.
#pragma once

#include <cstdint>

#include "abi/host_device.h"

namespace flashplan {

/// The scales of q, k or v for the kv heads, in memory of the device that runs the kernel.
struct HeadScales {
  const float* data = nullptr;  // null: all scales are 1
  int32_t stride = 0;           // elements from head to head; 0: one scale for all heads

  FLASHPLAN_HOST_DEVICE float of(int32_t kv_head) const {
    return data == nullptr ? 1.0F : data[kv_head * stride];
  }
};

}  // namespace flashplan
