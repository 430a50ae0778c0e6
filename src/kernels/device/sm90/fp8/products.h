// SPDX-License-Identifier: Apache-2.0
// Hopper's matrix products of float8_e4m3fn (PTX ISA, wgmma; sm_90a).
#pragma once

#include "kernels/device/sm90/wgmma.h"

namespace flashplan::device {

// Operands of the assembler text: registers of d.
#define FLASHPLAN_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHPLAN_D48                                                                  \
  FLASHPLAN_D16                                                                        \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHPLAN_D64 \
  FLASHPLAN_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHPLAN_8(c, i) \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define FLASHPLAN_16(c) FLASHPLAN_8(c, 0), FLASHPLAN_8(c, 8)
#define FLASHPLAN_48(c) \
  FLASHPLAN_16(c), FLASHPLAN_8(c, 16), FLASHPLAN_8(c, 24), FLASHPLAN_8(c, 32), FLASHPLAN_8(c, 40)
#define FLASHPLAN_64(c) FLASHPLAN_48(c), FLASHPLAN_8(c, 48), FLASHPLAN_8(c, 56)

/// Products of 64 rows by as many columns as `d` has by 32, whose operands have the 32 side by side
/// in memory. A thread's accumulators are those of Wgmma. They keep about 14 bits of mantissa while
/// products are added, so long sums must be taken in parts.
struct WgmmaE4m3 {
  /// d = a * b.
  static FLASHPLAN_DEVICE void first(float (&d)[64], WgmmaOperand a, WgmmaOperand b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" FLASHPLAN_D64
                 "}, %64, %65, 0, 1, 1;\n"
                 : FLASHPLAN_64("=f")
                 : "l"(a.bits()), "l"(b.bits()));
  }
  /// d += a * b.
  static FLASHPLAN_DEVICE void add(float (&d)[64], WgmmaOperand a, WgmmaOperand b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" FLASHPLAN_D64
                 "}, %64, %65, 1, 1, 1;\n"
                 : FLASHPLAN_64("+f")
                 : "l"(a.bits()), "l"(b.bits()));
  }
  /// d = a * b and d += a * b with `a` from registers: a[i] has four neighbouring columns of a row.
  /// The row is 16 * warp + i % 2 * 8 + lane / 4, the first column 4 * (lane % 4) + i / 2 * 16.
  static FLASHPLAN_DEVICE void first(float (&d)[48], const uint32_t (&a)[4], WgmmaOperand b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {" FLASHPLAN_D48
                 "}, {%48, %49, %50, %51}, %52, 0, 1, 1;\n"
                 : FLASHPLAN_48("=f")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  }
  static FLASHPLAN_DEVICE void add(float (&d)[48], const uint32_t (&a)[4], WgmmaOperand b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {" FLASHPLAN_D48
                 "}, {%48, %49, %50, %51}, %52, 1, 1, 1;\n"
                 : FLASHPLAN_48("+f")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  }
  static FLASHPLAN_DEVICE void first(float (&d)[16], const uint32_t (&a)[4], WgmmaOperand b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" FLASHPLAN_D16
                 "}, {%16, %17, %18, %19}, %20, 0, 1, 1;\n"
                 : FLASHPLAN_16("=f")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  }
  static FLASHPLAN_DEVICE void add(float (&d)[16], const uint32_t (&a)[4], WgmmaOperand b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" FLASHPLAN_D16
                 "}, {%16, %17, %18, %19}, %20, 1, 1, 1;\n"
                 : FLASHPLAN_16("+f")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  }
};

#undef FLASHPLAN_D16
#undef FLASHPLAN_D48
#undef FLASHPLAN_D64
#undef FLASHPLAN_8
#undef FLASHPLAN_16
#undef FLASHPLAN_48
#undef FLASHPLAN_64

/// Four numbers as e4m3, the first one in the lowest byte. Those that are too large become 448.
FLASHPLAN_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t four;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

}  // namespace flashplan::device
