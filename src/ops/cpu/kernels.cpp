// SPDX-License-Identifier: Apache-2.0
// The operators on rows of a tensor. This file is compiled once per instruction set, with
// FLASHPLAN_ISA as its name. Only operator_kernels() may have external linkage: if another function
// had it, the linker would keep one of its copies, perhaps with instructions that the machine does
// not have. Instances of std:: templates have external linkage, so none are used here.
#include "ops/cpu/kernels.h"

#include "cpu/float_formats.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace flashplan::cpu::FLASHPLAN_ISA {
namespace {

#include "cpu/rotation.h"
#include "cpu/vec.h"
// The headers below use the two above.
#include "ops/cpu/float_blocks.h"
// The headers below use float_blocks.h.
#include "ops/cpu/activation_rows.h"
#include "ops/cpu/norm_rows.h"
#include "ops/cpu/quantize_rows.h"
#include "ops/cpu/softmax_rows.h"
// rope_rows.h uses quantize_rows.h.
#include "ops/cpu/rope_rows.h"
// append_rows.h uses rope_rows.h.
#include "ops/cpu/append_rows.h"
// mla_rows.h uses norm_rows.h and append_rows.h.
#include "ops/cpu/mla_rows.h"

}  // namespace

const OperatorKernels& operator_kernels() noexcept {
  static constexpr OperatorKernels kKernels = {
      norm_rows,    gated_activation_rows, rope_rows,        raise_scales,    quantize_rows,
      softmax_rows, append_rows,           rope_append_rows, append_mla_rows, gather_mla_rows};
  return kKernels;
}

}  // namespace flashplan::cpu::FLASHPLAN_ISA
