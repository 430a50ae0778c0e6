// SPDX-License-Identifier: Apache-2.0
// Stands in for src/cuda/device.h: the properties of the GPU that is emulated.
#pragma once

#include <cstdint>

namespace flashplan::cuda {

struct EmulatedFacts {
  int32_t num_sms = 132;
  int32_t major = 9;
};

inline EmulatedFacts emulated_facts;

#define device_facts(device) ((void)(device), emulated_facts)

}  // namespace flashplan::cuda
