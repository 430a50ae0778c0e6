// SPDX-License-Identifier: Apache-2.0
// The CPU kernels that are compiled in, once per instruction set, with FLASHPLAN_ISA as its name.
// Nothing with external linkage but kernel_set() may come out of this file, or the linker could
// give one instruction set's code to another: hence no std:: templates here.
#include "cpu/run_queue.h"

namespace flashplan::cpu::FLASHPLAN_ISA {

const KernelSet& kernel_set() noexcept {
  static constexpr KernelSet set = {
      run_queue<DType::kFloat32, Standard>,    run_queue<DType::kFloat16, Standard>,
      run_queue<DType::kBFloat16, Standard>,   run_queue<DType::kFloat8E4M3, Standard>,
      run_queue<DType::kFloat8E5M2, Standard>, run_queue<DType::kFp8DsMla, Standard>};
  return set;
}

}  // namespace flashplan::cpu::FLASHPLAN_ISA
