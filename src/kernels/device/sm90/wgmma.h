// SPDX-License-Identifier: Apache-2.0
// Hopper's matrix products of a warpgroup (PTX ISA, wgmma; sm_90a).
#pragma once

#include "flashplan/tensor.h"
#include "kernels/device/ptx.h"
#include "kernels/device/sm90/wgmma_tile.h"

namespace flashplan::device {

/// Orders earlier writes to registers before the products that use them. It must come before the
/// first product of a batch.
FLASHPLAN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
/// Ends a batch of products.
FLASHPLAN_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
/// Waits until at most kPending batches, the latest ones, are in flight.
template <int kPending>
FLASHPLAN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving uses of accumulators across this place.
template <int kCount>
FLASHPLAN_DEVICE void pin(float (&d)[kCount]) {
#pragma unroll
  for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}

/// Sets accumulators to 0 by mov, because for `x = 0` nvcc makes zeros in 64 uniform registers and
/// copies them to the accumulators, twice.
template <int kCount>
FLASHPLAN_DEVICE void clear(float (&d)[kCount]) {
#pragma unroll
  for (float& x : d) asm volatile("mov.b32 %0, 0;" : "=f"(x));
}

/// d (+)= a * b, where d has 64 rows and kColumns columns, and products are summed over 16 dims or
/// rows. A thread's accumulators are those of m16n8 tiles side by side: d[4 * n + 2 * half + j] is
/// row 16 * warp + 8 * half + lane / 4, column 8 * n + 2 * (lane % 4) + j.
template <DType kDType, int kColumns>
struct Wgmma;
// Operands of the assembler text, eight at a time.
#define FLASHPLAN_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASHPLAN_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHPLAN_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHPLAN_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHPLAN_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHPLAN_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHPLAN_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASHPLAN_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHPLAN_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FLASHPLAN_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHPLAN_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FLASHPLAN_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHPLAN_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FLASHPLAN_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FLASHPLAN_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FLASHPLAN_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLASHPLAN_D8(i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLASHPLAN_W8(i)                                                                       \
  "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), \
      "=f"(d[i + 6]), "=f"(d[i + 7])

// Defines Wgmma for `n` columns. `r`: the registers of d in the assembler text; `d_` and `w_`: d as
// operands that are added to, or only written; `o0` to `o5`: the numbers of the operands after
// these.
#define FLASHPLAN_WGMMA(dtype, text, n, r, d_, w_, o0, o1, o2, o3, o4, o5)                        \
  template <>                                                                                     \
  struct Wgmma<dtype, n> {                                                                        \
    /* d (+)= a * b^T, both from shared memory: sums over their dims. */                          \
    static FLASHPLAN_DEVICE void by_dims(float (&d)[n / 2], WgmmaOperand a, WgmmaOperand b,       \
                                         bool adds) {                                             \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #o2                                 \
                   ", 0;\n"                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." text "." text " {" r         \
                   "}, %" #o0 ", %" #o1 ", adds, 1, 1, 0, 0;\n}\n"                                \
                   : d_                                                                           \
                   : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int>(adds)));                  \
    }                                                                                             \
    /* d = a * b^T: d may be uninitialised.  */                                                   \
    static FLASHPLAN_DEVICE void first_by_dims(float (&d)[n / 2], WgmmaOperand a,                 \
                                               WgmmaOperand b) {                                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." text "." text " {" r         \
                   "}, %" #o0 ", %" #o1 ", 0, 1, 1, 0, 0;\n"                                      \
                   : w_                                                                           \
                   : "l"(a.bits()), "l"(b.bits()));                                               \
    }                                                                                             \
    /* d (+)= a * b, a from registers: sums over b's rows. */                                     \
    static FLASHPLAN_DEVICE void by_rows(float (&d)[n / 2], const uint32_t (&a)[4],               \
                                         WgmmaOperand b, bool adds) {                             \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #o5                                 \
                   ", 0;\n"                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." text "." text " {" r         \
                   "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", adds, 1, 1, 1;\n}\n"   \
                   : d_                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()),                   \
                     "r"(static_cast<int>(adds)));                                                \
    }                                                                                             \
    /* d += a * b, a from shared memory: sums over a's dims and b's rows. */                      \
    static FLASHPLAN_DEVICE void add_by_rows(float (&d)[n / 2], WgmmaOperand a, WgmmaOperand b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." text "." text " {" r         \
                   "}, %" #o0 ", %" #o1 ", 1, 1, 1, 0, 1;\n"                                      \
                   : d_                                                                           \
                   : "l"(a.bits()), "l"(b.bits()));                                               \
    }                                                                                             \
  };
#define FLASHPLAN_WGMMAS(n, r, d_, w_, ...)                                                        \
  FLASHPLAN_WGMMA(DType::kFloat16, "f16", n, r, FLASHPLAN_LIST d_, FLASHPLAN_LIST w_, __VA_ARGS__) \
  FLASHPLAN_WGMMA(DType::kBFloat16, "bf16", n, r, FLASHPLAN_LIST d_, FLASHPLAN_LIST w_, __VA_ARGS__)
#define FLASHPLAN_LIST(...) __VA_ARGS__
FLASHPLAN_WGMMAS(64, FLASHPLAN_R0 ", " FLASHPLAN_R1 ", " FLASHPLAN_R2 ", " FLASHPLAN_R3,
                 (FLASHPLAN_D8(0), FLASHPLAN_D8(8), FLASHPLAN_D8(16), FLASHPLAN_D8(24)),
                 (FLASHPLAN_W8(0), FLASHPLAN_W8(8), FLASHPLAN_W8(16), FLASHPLAN_W8(24)), 32, 33, 34,
                 35, 36, 37)
FLASHPLAN_WGMMAS(
    80, FLASHPLAN_R0 ", " FLASHPLAN_R1 ", " FLASHPLAN_R2 ", " FLASHPLAN_R3 ", " FLASHPLAN_R4,
    (FLASHPLAN_D8(0), FLASHPLAN_D8(8), FLASHPLAN_D8(16), FLASHPLAN_D8(24), FLASHPLAN_D8(32)),
    (FLASHPLAN_W8(0), FLASHPLAN_W8(8), FLASHPLAN_W8(16), FLASHPLAN_W8(24), FLASHPLAN_W8(32)), 40,
    41, 42, 43, 44, 45)
FLASHPLAN_WGMMAS(96,
                 FLASHPLAN_R0 ", " FLASHPLAN_R1 ", " FLASHPLAN_R2 ", " FLASHPLAN_R3
                              ", " FLASHPLAN_R4 ", " FLASHPLAN_R5,
                 (FLASHPLAN_D8(0), FLASHPLAN_D8(8), FLASHPLAN_D8(16), FLASHPLAN_D8(24),
                  FLASHPLAN_D8(32), FLASHPLAN_D8(40)),
                 (FLASHPLAN_W8(0), FLASHPLAN_W8(8), FLASHPLAN_W8(16), FLASHPLAN_W8(24),
                  FLASHPLAN_W8(32), FLASHPLAN_W8(40)),
                 48, 49, 50, 51, 52, 53)
FLASHPLAN_WGMMAS(128,
                 FLASHPLAN_R0 ", " FLASHPLAN_R1 ", " FLASHPLAN_R2 ", " FLASHPLAN_R3
                              ", " FLASHPLAN_R4 ", " FLASHPLAN_R5 ", " FLASHPLAN_R6
                              ", " FLASHPLAN_R7,
                 (FLASHPLAN_D8(0), FLASHPLAN_D8(8), FLASHPLAN_D8(16), FLASHPLAN_D8(24),
                  FLASHPLAN_D8(32), FLASHPLAN_D8(40), FLASHPLAN_D8(48), FLASHPLAN_D8(56)),
                 (FLASHPLAN_W8(0), FLASHPLAN_W8(8), FLASHPLAN_W8(16), FLASHPLAN_W8(24),
                  FLASHPLAN_W8(32), FLASHPLAN_W8(40), FLASHPLAN_W8(48), FLASHPLAN_W8(56)),
                 64, 65, 66, 67, 68, 69)
FLASHPLAN_WGMMAS(256,
                 FLASHPLAN_R0 ", " FLASHPLAN_R1 ", " FLASHPLAN_R2 ", " FLASHPLAN_R3
                              ", " FLASHPLAN_R4 ", " FLASHPLAN_R5 ", " FLASHPLAN_R6
                              ", " FLASHPLAN_R7 ", " FLASHPLAN_R8 ", " FLASHPLAN_R9
                              ", " FLASHPLAN_R10 ", " FLASHPLAN_R11 ", " FLASHPLAN_R12
                              ", " FLASHPLAN_R13 ", " FLASHPLAN_R14 ", " FLASHPLAN_R15,
                 (FLASHPLAN_D8(0), FLASHPLAN_D8(8), FLASHPLAN_D8(16), FLASHPLAN_D8(24),
                  FLASHPLAN_D8(32), FLASHPLAN_D8(40), FLASHPLAN_D8(48), FLASHPLAN_D8(56),
                  FLASHPLAN_D8(64), FLASHPLAN_D8(72), FLASHPLAN_D8(80), FLASHPLAN_D8(88),
                  FLASHPLAN_D8(96), FLASHPLAN_D8(104), FLASHPLAN_D8(112), FLASHPLAN_D8(120)),
                 (FLASHPLAN_W8(0), FLASHPLAN_W8(8), FLASHPLAN_W8(16), FLASHPLAN_W8(24),
                  FLASHPLAN_W8(32), FLASHPLAN_W8(40), FLASHPLAN_W8(48), FLASHPLAN_W8(56),
                  FLASHPLAN_W8(64), FLASHPLAN_W8(72), FLASHPLAN_W8(80), FLASHPLAN_W8(88),
                  FLASHPLAN_W8(96), FLASHPLAN_W8(104), FLASHPLAN_W8(112), FLASHPLAN_W8(120)),
                 128, 129, 130, 131, 132, 133)
#undef FLASHPLAN_R0
#undef FLASHPLAN_R1
#undef FLASHPLAN_R2
#undef FLASHPLAN_R3
#undef FLASHPLAN_R4
#undef FLASHPLAN_R5
#undef FLASHPLAN_R6
#undef FLASHPLAN_R7
#undef FLASHPLAN_R8
#undef FLASHPLAN_R9
#undef FLASHPLAN_R10
#undef FLASHPLAN_R11
#undef FLASHPLAN_R12
#undef FLASHPLAN_R13
#undef FLASHPLAN_R14
#undef FLASHPLAN_R15
#undef FLASHPLAN_D8
#undef FLASHPLAN_W8
#undef FLASHPLAN_LIST
#undef FLASHPLAN_WGMMA
#undef FLASHPLAN_WGMMAS

}  // namespace flashplan::device
