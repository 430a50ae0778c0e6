// SPDX-License-Identifier: Apache-2.0
// Turns a description into source that both engines compile.
#pragma once

#include <string>

#include "abi/rope_turns.h"
#include "variant/variant_impl.h"

namespace flashplan {

/// The source of `struct UserVariant`. It is compiled where Standard, Softcap and OwnLogits of an
/// engine and the functions of abi/variant_math.h are declared. `softcap` is that of the plan, and
/// `rope` too, where the engine has the rotation compiled in (GPU); else null.
std::string variant_source(const Variant::Impl& variant, bool softcap,
                           const RopeTurns* rope = nullptr);

/// "DType::kFloat16".
const char* dtype_constant(DType dtype);

/// The type in C++ of an element of a variant's tensor; null for dtypes that these can not have.
const char* element_type(DType dtype);

}  // namespace flashplan
