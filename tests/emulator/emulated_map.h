// SPDX-License-Identifier: Apache-2.0
// What the emulator keeps in a TensorMap.
#pragma once

#include <array>
#include <cstdint>

#include "abi/tensor_maps.h"

namespace flashplan::device {

/// The innermost dimension is the first. Elements have 16 bits, and boxes are swizzled by 128
/// bytes.
struct EmulatedMap {
  struct Dim {
    int64_t size = 1;
    int64_t stride = 0;  // in elements
  };
  const uint16_t* data = nullptr;
  std::array<Dim, 5> dims = {};
  std::array<int32_t, 5> box = {1, 1, 1, 1, 1};
};
static_assert(sizeof(EmulatedMap) <= sizeof(TensorMap));

}  // namespace flashplan::device
