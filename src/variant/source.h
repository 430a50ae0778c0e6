// SPDX-License-Identifier: Apache-2.0
// Turns a description into source that both engines compile.
#pragma once

#include <string>

#include "abi/rope_turns.h"
#include "variant/variant_impl.h"

namespace flashplan {

/// The source of `struct UserVariant`. It is compiled where an engine's Standard, Softcap and
/// OwnLogits and the functions of abi/variant_math.h are declared. `softcap`: whether the plan has
/// one. `rope`: the plan's rotation, if the engine has rotations compiled in (GPU); else null.
std::string variant_source(const Variant::Impl& variant, bool softcap,
                           const RopeTurns* rope = nullptr);

/// The name of a dtype in C++ source, such as "DType::kFloat16".
const char* dtype_constant(DType dtype);

/// The C++ type of the elements of a variant's tensor; null for dtypes that it can not have.
const char* element_type(DType dtype);

}  // namespace flashplan
