// SPDX-License-Identifier: Apache-2.0
// Turns a description into source that both engines compile.
#pragma once

#include <string>

#include "variant/variant_impl.h"

namespace flashplan {

/// The source of `struct UserVariant`. It is compiled where Standard, Softcap and OwnLogits of an
/// engine and the functions of abi/variant_math.h are declared. `softcap` is that of the plan.
std::string variant_source(const Variant::Impl& variant, bool softcap);

/// "DType::kFloat16".
const char* dtype_constant(DType dtype);

}  // namespace flashplan
