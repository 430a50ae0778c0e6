// SPDX-License-Identifier: Apache-2.0
// The CPU kernels that are compiled in, once per instruction set, with FLASHPLAN_ISA as its name.
// Nothing with external linkage but kernel_set() may come out of this file, or the linker could
// give one instruction set's code to another: hence no std:: templates here.
#include "cpu/run_queue.h"

namespace flashplan::cpu::FLASHPLAN_ISA {

const KernelSet& kernel_set() noexcept {
  static constexpr KernelSet set = {.float32 = run_queue<DType::kFloat32, Standard>,
                                    .float16 = run_queue<DType::kFloat16, Standard>,
                                    .bfloat16 = run_queue<DType::kBFloat16, Standard>,
                                    .float8_e4m3 = run_queue<DType::kFloat8E4M3, Standard>,
                                    .float8_e5m2 = run_queue<DType::kFloat8E5M2, Standard>,
                                    .fp8_ds_mla = run_queue<DType::kFp8DsMla, Standard>};
  return set;
}

}  // namespace flashplan::cpu::FLASHPLAN_ISA
