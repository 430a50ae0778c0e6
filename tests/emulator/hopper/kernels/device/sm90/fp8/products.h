// SPDX-License-Identifier: Apache-2.0
// In place of the library's products.h, for fibers of the emulator. As in wgmma.h, products are
// computed when they are waited for, no sooner.
#pragma once

#include "cpu/float_formats.h"
#include "kernels/device/sm90/wgmma.h"

namespace flashplan::device {

/// A product over 32 is two of those that Product holds, over 16 each.
struct WgmmaE4m3 {
  using E4m3 = cpu::Format<DType::kFloat8E4M3>;

  template <int kCount, typename A>
  static void first(float (&d)[kCount], const A& a, WgmmaOperand b) {
    start(d, a, b, false);
  }
  template <int kCount, typename A>
  static void add(float (&d)[kCount], const A& a, WgmmaOperand b) {
    start(d, a, b, true);
  }

 private:
  static constexpr uint32_t kHalf = 1;  // to the second 16 of an operand, as descriptors count

  template <int kCount>
  static void start(float (&d)[kCount], WgmmaOperand a, WgmmaOperand b, bool adds) {
    auto& open = products().open;
    open.push_back({d, 2 * kCount, adds, false, false, {}, a, b, compute});
    open.push_back({d, 2 * kCount, true, false, false, {}, a + kHalf, b + kHalf, compute});
  }
  template <int kCount>
  static void start(float (&d)[kCount], const uint32_t (&a)[4], WgmmaOperand b, bool adds) {
    Product halves[2] = {{d, 2 * kCount, adds, false, true, {}, {}, b, compute},
                         {d, 2 * kCount, true, false, true, {}, {}, b + kHalf, compute}};
    const int quad = simt::cta->current % 32 / 4 * 4;
    for (int j = 0; j < 4; ++j) {
      const uint64_t* shared = simt::share(a[j]);
      for (int i = 0; i < 16; ++i) {
        const auto byte = static_cast<uint8_t>(shared[quad + i / 4] >> (i % 4 * 8));
        halves[j / 2].a_registers[j % 2][i] = E4m3::load(byte);
      }
    }
    for (const Product& half : halves) products().open.push_back(half);
  }

  /// Element `k` of a row of an operand.
  static float element(WgmmaOperand operand, int row, int k) {
    const uint32_t begin = (operand.low & 0x3fffU) << 4;
    const uint32_t stride = (operand.high & 0x3fffU) << 4;
    const auto r = static_cast<uint32_t>(row);
    const uint32_t address = begin + r / 8 * stride + r % 8 * 128 + static_cast<uint32_t>(k);
    return E4m3::load(*at_shared<uint8_t>(address ^ (address >> 7 & 7) << 4));
  }
  static void compute(const Product& product) {
    const int thread = simt::cta->current % 128;
    float rows[2][16];
    for (int half = 0; half < 2; ++half) {
      const int row = thread / 32 * 16 + half * 8 + thread % 32 / 4;
      for (int k = 0; k < 16; ++k) {
        rows[half][k] =
            product.has_registers ? product.a_registers[half][k] : element(product.a, row, k);
      }
    }
    for (int i = 0; i < product.num_columns / 2; ++i) {
      const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      float sum = product.adds ? product.d[i] : 0.0F;
      for (int k = 0; k < 16; ++k) sum += rows[i / 2 % 2][k] * element(product.b, column, k);
      product.d[i] = sum;
    }
  }
};

inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  const auto byte = [](float x) { return uint32_t{WgmmaE4m3::E4m3::store(x)}; };
  return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}

}  // namespace flashplan::device
