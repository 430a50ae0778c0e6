// SPDX-License-Identifier: Apache-2.0
// In place of the library's wgmma.h, for fibers of the emulator. Products are computed when they
// are waited for, no sooner, each thread's accumulators by the thread.
#pragma once

#include "kernels/device/element.h"
#include "kernels/device/sm90/wgmma_tile.h"

namespace flashplan::device {

/// A product that is under way.
struct Product {
  float* d;
  int num_columns;
  bool adds;
  bool sums_over_rows;  // of b, else over its dims
  bool has_registers;
  float a_registers[2][16];  // of this thread's two rows
  WgmmaOperand a;
  WgmmaOperand b;
  void (*compute)(const Product&);
};
struct Products {
  std::vector<Product> open;
  std::deque<std::vector<Product>> committed;
};
inline Products& products() {
  static thread_local Products all[simt::kMaxThreads];
  return all[simt::cta->current];
}

/// Fetches 16 elements of a row or column of an operand, those that are summed over.
template <DType kDType>
void fetch(float (&to)[16], WgmmaOperand operand, bool by_rows, int row) {
  const uint32_t begin = (operand.low & 0x3fffU) << 4;
  const uint32_t leading = (operand.low >> 16 & 0x3fffU) << 4;
  const uint32_t stride = (operand.high & 0x3fffU) << 4;
  for (int k = 0; k < 16; ++k) {
    const auto r = static_cast<uint32_t>(by_rows ? k : row);
    const auto c = static_cast<uint32_t>(by_rows ? row : k);
    const uint32_t address =
        begin + r / 8 * stride + r % 8 * 128 + (by_rows ? c / 64 * leading + c % 64 * 2 : c * 2);
    to[k] =
        Element<kDType>::unpack(uint32_t{*at_shared<uint16_t>(address ^ (address >> 7 & 7) << 4)})
            .x;
  }
}
template <DType kDType>
void compute(const Product& product) {
  const int thread = simt::cta->current % 128;
  float rows[2][16];
  for (int half = 0; half < 2; ++half) {
    const int row = thread / 32 * 16 + half * 8 + thread % 32 / 4;
    if (product.has_registers) {
      std::copy_n(product.a_registers[half], 16, rows[half]);
    } else {
      fetch<kDType>(rows[half], product.a, false, row);
    }
  }
  for (int n = 0; n < product.num_columns / 4; ++n) {
    float column[16];
    fetch<kDType>(column, product.b, product.sums_over_rows, n / 2 * 8 + thread % 4 * 2 + n % 2);
    for (int half = 0; half < 2; ++half) {
      float& d = product.d[n / 2 * 4 + half * 2 + n % 2];
      float sum = product.adds ? d : 0.0F;
      for (int k = 0; k < 16; ++k) sum += rows[half][k] * column[k];
      d = sum;
    }
  }
}

inline void wgmma_fence() {}
inline void wgmma_commit() {
  products().committed.push_back(std::move(products().open));
  products().open.clear();
}
template <int kPending>
void wgmma_wait() {
  auto& committed = products().committed;
  // Others go on meanwhile.
  for (int i = 0; i < 4; ++i) simt::yield();
  while (static_cast<int>(committed.size()) > kPending) {
    for (const Product& product : committed.front()) product.compute(product);
    simt::note_event();
    committed.pop_front();
  }
}
template <int kCount>
void pin(float (&)[kCount]) {}
template <int kCount>
void clear(float (&d)[kCount]) {
  std::fill(d, d + kCount, 0.0F);
}

template <DType kDType, int kColumns>
struct Wgmma {
  using D = float[kColumns / 2];

  static void by_dims(D& d, WgmmaOperand a, WgmmaOperand b, bool adds) {
    start({d, kColumns, adds, false, false, {}, a, b, compute<kDType>});
  }
  static void first_by_dims(D& d, WgmmaOperand a, WgmmaOperand b) { by_dims(d, a, b, false); }
  static void by_rows(D& d, const uint32_t (&a)[4], WgmmaOperand b, bool adds) {
    Product product = {d, kColumns, adds, true, true, {}, {}, b, compute<kDType>};
    const int quad = simt::cta->current % 32 / 4 * 4;
    for (int part = 0; part < 2; ++part) {  // of the 16 dims
      const uint64_t* shared = simt::share(a[2 * part] | uint64_t{a[2 * part + 1]} << 32);
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          const float2 pair =
              Element<kDType>::unpack(static_cast<uint32_t>(shared[quad + i] >> 32 * half));
          product.a_registers[half][part * 8 + i * 2] = pair.x;
          product.a_registers[half][part * 8 + i * 2 + 1] = pair.y;
        }
      }
    }
    start(product);
  }
  static void add_by_rows(D& d, WgmmaOperand a, WgmmaOperand b) {
    start({d, kColumns, true, true, false, {}, a, b, compute<kDType>});
  }

 private:
  static void start(const Product& product) { products().open.push_back(product); }
};

}  // namespace flashplan::device
