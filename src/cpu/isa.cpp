// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <cstdlib>
#include <string_view>

namespace flashplan::cpu {

Isa widest_isa() noexcept {
  [[maybe_unused]] const char* variable = std::getenv("FLASHPLAN_MAX_CPU_ISA");
  [[maybe_unused]] const std::string_view most = variable != nullptr ? variable : "";
#if defined(FLASHPLAN_HAVE_AVX512)
  if (most != "avx2" && most != "baseline" && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
#endif
#if defined(FLASHPLAN_HAVE_AVX2)
  // F16C is not asked for: not every compiler has a name for it, and all processors with AVX2 have
  // it.
  if (most != "baseline" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("fma")) {
    return Isa::kAvx2;
  }
#endif
  return Isa::kBaseline;
}

}  // namespace flashplan::cpu
