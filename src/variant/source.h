// SPDX-License-Identifier: Apache-2.0
// Turns the description of a variant into source code for the CPU and for GPUs.
#pragma once

#include <string>

#include "abi/rope_turns.h"
#include "variant/variant_impl.h"

namespace flashplan {

/// The source of `struct UserVariant`. It must be compiled behind the declarations of Standard,
/// Softcap and OwnLogits (variant.h of cpu or kernels/device) and of the functions in
/// abi/variant_math.h. `softcap`: whether the plan has one. `rope`: the plan's rotation, if it is
/// compiled into the kernel, as on a GPU; else null.
std::string variant_source(const Variant::Impl& variant, bool softcap,
                           const RopeTurns* rope = nullptr);

/// The name of a dtype in C++ source, such as "DType::kFloat16".
const char* dtype_constant(DType dtype);

/// The C++ type of the elements of a variant's tensor; null for dtypes that it can not have.
const char* element_type(DType dtype);

}  // namespace flashplan
