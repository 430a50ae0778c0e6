// SPDX-License-Identifier: Apache-2.0
// In place of the library's products.h, for fibers of the emulator. Products are computed at once.
#pragma once

#include "cpu/float_formats.h"
#include "kernels/device/sm90/wgmma.h"

namespace flashplan::device {

struct WgmmaE4m3 {
  using E4m3 = cpu::Format<DType::kFloat8E4M3>;

  static void first(float (&d)[64], WgmmaOperand a, WgmmaOperand b) {
    std::fill(d, d + 64, 0.0F);
    add(d, a, b);
  }
  static void add(float (&d)[64], WgmmaOperand a, WgmmaOperand b) {
    const int thread = simt::cta->current % 128;
    float rows[2][32];
    for (int half = 0; half < 2; ++half) {
      const int row = thread / 32 * 16 + half * 8 + thread % 32 / 4;
      for (int k = 0; k < 32; ++k) rows[half][k] = element(a, row, k);
    }
    multiply(d, rows, b);
  }
  template <int kCount>
  static void first(float (&d)[kCount], const uint32_t (&a)[4], WgmmaOperand b) {
    std::fill(d, d + kCount, 0.0F);
    add(d, a, b);
  }
  template <int kCount>
  static void add(float (&d)[kCount], const uint32_t (&a)[4], WgmmaOperand b) {
    const int quad = simt::cta->current % 32 / 4 * 4;
    float rows[2][32];
    for (int j = 0; j < 4; ++j) {
      const uint64_t* shared = simt::share(a[j]);
      for (int i = 0; i < 16; ++i) {
        const auto byte = static_cast<uint8_t>(shared[quad + i / 4] >> (i % 4 * 8));
        rows[j % 2][j / 2 * 16 + i] = E4m3::load(byte);
      }
    }
    multiply(d, rows, b);
  }

 private:
  /// Element `k` of a row of an operand.
  static float element(WgmmaOperand operand, int row, int k) {
    const uint32_t begin = (operand.low & 0x3fffU) << 4;
    const uint32_t stride = (operand.high & 0x3fffU) << 4;
    const auto r = static_cast<uint32_t>(row);
    const uint32_t address = begin + r / 8 * stride + r % 8 * 128 + static_cast<uint32_t>(k);
    return E4m3::load(*at_shared<uint8_t>(address ^ (address >> 7 & 7) << 4));
  }
  template <int kCount>
  static void multiply(float (&d)[kCount], const float (&rows)[2][32], WgmmaOperand b) {
    const int thread = simt::cta->current % 128;
    for (int i = 0; i < kCount; ++i) {
      const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      for (int k = 0; k < 32; ++k) d[i] += rows[i / 2 % 2][k] * element(b, column, k);
    }
  }
};

inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  const auto byte = [](float x) { return uint32_t{WgmmaE4m3::E4m3::store(x)}; };
  return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}

}  // namespace flashplan::device
