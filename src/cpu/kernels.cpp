// SPDX-License-Identifier: Apache-2.0
// The CPU kernels that are compiled in, once for each instruction set; FLASHPLAN_ISA is its name.
// Only kernel_set() may have external linkage: if another function had it, the linker would keep
// one of its copies, perhaps with instructions that the machine does not have. Instances of std::
// templates have external linkage, so none are used here.
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
